"""A training run from start, or from a checkpoint, to its last step."""

import math
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from ..interrupt import EXIT_CODES, Interrupted, Stop, noticing
from . import checkpoint, snapshot
from .config import TrainConfig
from .data import Corpus
from .device import compiler_told
from .errors import DivergedError, SettingsError, TrainingError
from .history import History, RunResult
from .memory import memory_told
from .pace import measure
from .progress import Progress
from .ranks import ALONE, Ranks
from .resume import describe_run, require_same_run
from .stopwatch import Stopwatch
from .trainer import Trainer

# Reading a loss from an accelerator waits for it, so losses are fetched in groups there.
FETCH_EVERY = {"cpu": 1, "cuda": 10}


class Run:
    """A run with its history; nothing is written before every check has passed.

    Args:
        folder: where checkpoints go; None saves none.
        resume: continue from the newest checkpoint in `folder`.
        ranks: the processes that do it together, of which the first saves; all of them see `folder`.

    Raises:
        SettingsError: the recipe or the sizes do not run here, `folder` holds a run and `resume` is off, or `resume` is
            on and the checkpoint is missing or of another run.
        TrainingError: memory ran out.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        progress: Progress,
        folder: Path | None,
        *,
        resume: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.progress = progress
        self.folder = folder
        self._keeps = folder is not None and config.save_every > 0
        self.meta = describe_run(config, corpus, ranks.count)
        self.history = History()
        self.saved_step: int | None = None
        self._began, self._seconds = time.perf_counter(), 0.0
        self._pending: list[Tensor] = []
        if folder is not None and not resume:
            _require_empty(folder)
        with memory_told(config):
            self.trainer = Trainer(config, corpus, ranks)
        if config.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # left by an earlier run
        if folder is not None and resume:
            loaded, passed_over = checkpoint.load_newest(folder, lambda found: self._continue(found, corpus))
            for note in passed_over:
                progress.note(note)
            if loaded.step < config.steps:
                progress.note(f"goes on after step {loaded.step} of {config.steps}, from {loaded.path}")
        self.first_step = len(self.history.train)

    def train(self, title: str = "", place: str = "") -> RunResult:
        """Run the remaining steps, with evaluations and saves.

        Args:
            title: of the run in its progress; empty for its recipe.
            place: among several runs, as `Progress.begin` takes it.

        Raises:
            DivergedError: a loss or a saved model is not finite.
            TrainingError: the model that --init gives is not finite, a checkpoint cannot be written, or memory ran out.
            Interrupted: Ctrl-C or SIGTERM. One process finishes its step and saves it. Several processes may be in
                different steps, so they stop at once.
        """
        self._began, watch = time.perf_counter(), Stopwatch()
        steps = {"done": self.first_step, "total": self.config.steps}
        self.progress.begin(title or self.config.recipe, place=place, **steps)
        signals = nullcontext(Stop()) if self.ranks.mode else noticing(self.progress.note)
        try:
            with compiler_told(), memory_told(self.config), signals as stop:
                self._do_steps(watch, stop)
        except KeyboardInterrupt as error:
            raise self._interrupted() from error
        finally:
            self.progress.end()
        return RunResult(
            recipe=self.config.recipe,
            history=self.history,
            steps=self.config.steps,
            parameters=sum(p.numel() for p in self.trainer.model.parameters()),
            pace=measure(self.config, watch.tokens_per_second, self.ranks.count),
            seconds=self._time(),
            seed=self.config.seed,
        )

    def _do_steps(self, watch: Stopwatch, stop: Stop) -> None:
        config = self.config
        if self.first_step == 0:
            self._evaluate(0)
            self._stop_if_asked(0, stop)
        for index in range(self.first_step, config.steps):
            if index > self.first_step:  # the first step compiles and warms up
                watch.start()
            self._pending.append(self.trainer.step(index))
            done = index + 1
            evaluates = done % config.eval_every == 0 or done == config.steps
            saves = self._keeps and (done % config.save_every == 0 or done == config.steps)
            if evaluates or saves or done % FETCH_EVERY[config.device] == 0 or index == self.first_step:
                fetched = self._fetch_losses()
                watch.stop(fetched * config.tokens_per_step)
                pace = measure(config, watch.tokens_per_second, self.ranks.count)
                self.progress.step(done, self.history.train[-1], pace, evaluates=evaluates)
            if evaluates:
                self._evaluate(done)
            if saves:
                self._save(done)
            self._stop_if_asked(done, stop)

    def _stop_if_asked(self, done: int, stop: Stop) -> None:
        if stop.code is None:
            return
        if self._pending:
            self._fetch_losses()
        if self._keeps and 0 < done != self.saved_step:
            self._save(done)
        raise self._interrupted(stop.code)

    def _interrupted(self, code: int = EXIT_CODES[signal.SIGINT]) -> Interrupted:
        where = f"interrupted at step {len(self.history.train)} of {self.config.steps}"
        if not self.ranks.first:  # the first one saves
            return Interrupted(where, resumable=False, code=code)
        if self.saved_step is not None:
            return Interrupted(f"{where}; step {self.saved_step} is saved", resumable=True, code=code)
        why = "" if self._keeps else " with --save-every 0"
        return Interrupted(f"{where}; nothing is saved{why}", resumable=False, code=code)

    def _continue(self, loaded: checkpoint.Checkpoint, corpus: Corpus) -> None:
        try:
            notes = require_same_run(loaded, self.config, corpus, self.ranks.count)
            history = History.from_json(loaded.meta["history"])
            if len(history.train) != loaded.step:
                raise checkpoint.DamagedCheckpoint(f"{len(history.train)} losses of {loaded.step} steps")
            model, optimizer = self.trainer.model, self.trainer.optimizer
            if self.ranks.mode:
                snapshot.restore_shards(loaded.tensors, model, optimizer, self.trainer.orders)
            else:
                snapshot.restore(loaded.tensors, model, optimizer)
        except (*checkpoint.DAMAGE, RuntimeError) as error:  # RuntimeError: not a generator's state
            raise checkpoint.DamagedCheckpoint(f"{type(error).__name__}: {error}") from error
        self.history, self.saved_step = history, loaded.step
        self._seconds = float(loaded.meta.get("seconds", 0.0))
        for note in notes:
            self.progress.note(note)

    def _time(self) -> float:
        """Return the seconds of the run, those before a resume included."""
        return self._seconds + time.perf_counter() - self._began

    def _fetch_losses(self) -> int:
        losses = torch.stack(self._pending).tolist()
        self._pending.clear()
        for loss in losses:
            self.history.train.append(loss)
            self._require_finite("loss", loss, len(self.history.train))
        return len(losses)

    def _require_finite(self, what: str, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            told = f"the {what} is {loss} at step {step}"
            if step == 0:  # of the model that --init gives
                raise TrainingError(f"{told}; give --init finite weights")
            raise DivergedError(f"{told}; {remedy(self.config)}", step)

    def _evaluate(self, done: int) -> None:
        loss = self.trainer.evaluate()
        self._require_finite("held-out loss", loss, done)
        self.history.held_out.append((done, loss))
        self.progress.evaluated(done, loss)

    def _save(self, done: int) -> None:
        assert self.folder is not None
        model, optimizer = self.trainer.model, self.trainer.optimizer
        if self.ranks.mode:
            tensors = snapshot.take_shards(model, optimizer, self.trainer.orders)
        else:
            tensors = snapshot.take(model, optimizer)
        if not self.ranks.first:
            return
        saved = tensors[snapshot.MODEL]
        if not all(saved[name].isfinite().all() for name, _ in model.named_parameters()):
            self._require_finite("norm of the weights", math.nan, done)
        meta = {**self.meta, "history": self.history.to_json(), "seconds": self._time()}
        try:
            checkpoint.save(self.folder, step=done, meta=meta, tensors=tensors)
        except OSError as error:
            kept = (
                f"the checkpoint of step {self.saved_step} is kept"
                if self.saved_step
                else "none was saved before"
            )
            raise TrainingError(
                f"cannot save a checkpoint in {self.folder}: {error.strerror or error}; {kept}"
            ) from error
        self.saved_step = done


def remedy(config: TrainConfig) -> str:
    """Return what to change where a run diverged."""
    return f"lower --lr ({config.lr}) or --clip ({config.clip}), or raise --warmup ({config.warmup})"


def _require_empty(folder: Path) -> None:
    if present := checkpoint.steps_in(folder):
        raise SettingsError(
            f"{present[0]} is a checkpoint of an earlier run; add --resume to continue it, "
            "or give --out another folder"
        )
