"""Runs in their folders: one, or a series of them that goes on where it was left."""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast import receipt
from narrowcast._checks import counted

from ..interrupt import Interrupted
from . import checkpoint
from .atomic import write_bytes, write_json, writing_into
from .board import Board
from .config import TrainConfig, compared_fields
from .data import Corpus
from .errors import DivergedError, SettingsError, TrainingError
from .flops import flops_per_token
from .folder import CHECKPOINTS, DIVERGED, LOSSES, RESULT, runs_below
from .history import RunResult
from .kept import OPTIONS, content
from .loop import Run, remedy
from .machine import describe, remark
from .memory import expected_peak, parameters_of, require_memory
from .picture import caption, draw
from .progress import Progress
from .ranks import ALONE, Ranks
from .report import alone
from .tokens import TOKENIZER

BOARD = "tensorboard"
SLOW = 2e12  # operations of a step


def describe_runs(config: TrainConfig, corpus: Corpus, recipes: Sequence[str], seeds: int = 1) -> str:
    """Return in one line what the runs of a command train."""
    model, runs = config.model, len(recipes) * seeds
    table = " and --recipe-table" if config.recipe_table else ""
    each = f", {seeds} seeds each" if seeds > 1 else ""
    return (
        f"trains {counted(model.layers, 'block')} of width {model.dim} ({parameters_of(model):,} parameters), "
        f"{counted(config.steps, 'step')} of {counted(config.tokens_per_step, corpus.unit)} of {corpus.source}, "
        f"in {counted(runs, 'run')}: {', '.join(recipes)}{table}{each}"
    )


def run_in(
    folder: Path,
    config: TrainConfig,
    corpus: Corpus,
    progress: Progress,
    *,
    resume: bool,
    told: bool,
    title: str = "",
    place: str = "",
    intro: str = "",
    remarks: bool = True,
    tokenizer: str = "",
    tensorboard: bool = False,
    options: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Train a run, with its checkpoints and its result in a folder that this process holds.

    Args:
        resume: continue from the newest checkpoint.
        told: whether to tell the folder's name.
        title: of the run in its progress; empty for its recipe.
        place: among several runs, as `Progress.begin` takes it.
        intro: says what is trained.
        remarks: whether to note that, and what is unusual about the processor and the text.
        tokenizer: JSON of the text's tokenizer, which `generate` needs again; empty for bytes.
        tensorboard: also write TensorBoard's files into the folder.
        options: of the command, which the folder keeps for `--resume`.
        ranks: the processes that do it together, of which the first writes.

    Raises:
        SettingsError, TrainingError, Interrupted: as `Run`.
    """
    if not resume and (folder / RESULT).exists():
        raise SettingsError(
            f"{folder / RESULT} is of an earlier run; give --out another folder, or add --resume"
        )
    if resume and not checkpoint.steps_in(folder / CHECKPOINTS) and (several := runs_below(folder)):
        raise SettingsError(f"{folder} {several}, or repeat the --recipe and --seeds of all")
    if tensorboard and ranks.first:
        progress = Board(progress, folder / BOARD, config)
    operations = flops_per_token(config.model, config.seq_len) * config.tokens_per_step
    if remarks and config.device == "cpu" and operations > SLOW:
        require_memory(config, ranks.count, ranks.parts)  # what cannot run is refused, not called slow
        progress.note(
            f"a step has {operations / 1e12:,.0f} trillion operations: a CPU takes a minute or more; "
            "--preset tiny suits it"
        )
    run = Run(config, corpus, progress, folder / CHECKPOINTS, resume=resume, ranks=ranks)
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer and ranks.first:
            write_bytes(folder / TOKENIZER, tokenizer.encode())
        if options is not None and ranks.first and run.first_step < config.steps:
            write_json(folder / OPTIONS, content(options, config, several=bool(place)))
    if told:
        progress.note(f"the run is in {folder}")
    if config.optimizer != "adamw":
        covered = receipt(run.trainer.model).flops_covered
        progress.note(f"receipt: {covered:.1%} of the operations of GEMMs under {config.recipe}")
        peak = expected_peak(config)
        if peak is not None and (
            config.recompute or config.step_in_backward
        ):  # without, eager code holds more than the planner counts
            progress.note(f"memory: narrowcast plan expects a peak of {peak / 2**30:.1f} GiB")
    if remarks:
        for text in filter(None, (intro, *_remarks(config, corpus))):
            progress.note(text)
    marker = folder / DIVERGED
    if ranks.first:
        marker.unlink(missing_ok=True)
    try:
        result = run.train(title, place)
    except DivergedError as error:
        if ranks.first:
            with writing_into(folder):
                write_json(marker, {"recipe": config.recipe, "seed": config.seed, "step": error.step})
        raise
    report = folder / RESULT
    if resume and run.first_step == config.steps:
        progress.note(f"the run has all its steps; --steps above {config.steps} trains it further")
    written = run.first_step == config.steps and report.exists()
    if ranks.first and not written:  # resuming a finished run measures no speed
        with writing_into(folder):
            write_json(report, _summary(config, corpus, result, ranks))
            if not place:
                write_bytes(folder / LOSSES, _picture(config, corpus, result, run.first_step))
    return result


def _remarks(config: TrainConfig, corpus: Corpus) -> Iterator[str]:
    """Yield what is unusual about the settings, the processor and the text; "" among them."""
    yield remark(config.device)
    yield corpus.remark
    yield corpus.repeated(config.steps * config.tokens_per_step)
    if config.warmup > config.steps:
        yield (
            f"--warmup {config.warmup} is longer than --steps {config.steps}: the learning rate never reaches "
            f"--lr {config.lr:g}; give --warmup a smaller number"
        )
    if config.compile:
        yield "--compile compiles in the first evaluation and in the first step, which may take a minute each"


def series(
    folder: Path,
    configs: Sequence[TrainConfig],
    corpus: Corpus,
    progress: Progress,
    *,
    resume: bool,
    **kept: Any,
) -> str:
    """Train runs of other recipes and seeds one after the other, each in its own folder below one.

    Finished ones are left as they are. Where one diverges, the others go on, unless several processes train them.

    Args:
        resume: continue each run from its newest checkpoint, if it has one.
        kept: `intro`, `tokenizer`, `tensorboard`, `options` and `ranks`, as `run_in` takes them.

    Returns:
        which runs diverged, and what to change; "" if none did.

    Raises:
        SettingsError, TrainingError: as `Run`.
        Interrupted: as `Run`; the finished runs are kept, so it is always resumable.
    """
    diverged = []
    remarks = True  # the runs share the text: its remarks are noted once
    several = len({config.seed for config in configs}) > 1
    titles = [f"{config.recipe}, seed {config.seed}" if several else "" for config in configs]
    widest = max(map(len, titles))
    for index, config in enumerate(configs):
        own = folder / run_name(config)
        saved = resume and bool(checkpoint.steps_in(own / CHECKPOINTS))
        if resume and _is_finished(own / RESULT, config):
            progress.note(f"{own} is finished")
            continue
        if resume and not saved:  # left by a shorter run without checkpoints
            (own / RESULT).unlink(missing_ok=True)
        title = f"{titles[index]:<{widest}}"  # the figures of all runs stand below each other
        place = f"run {index + 1}/{len(configs)}" if len(configs) > 1 else ""
        options = {"resume": saved, "told": False, "title": title, "place": place, "remarks": remarks}
        try:
            # Each run compiles again, as it would alone: earlier graphs would count towards the compiler's limit.
            torch.compiler.reset()
            gc.collect()  # free the previous model before creating the next
            run_in(own, config, corpus, progress, **options, **kept)
        except DivergedError as error:
            if kept.get("ranks", ALONE).mode:  # the others may not have noticed
                raise TrainingError(f"{own}: {error}") from error
            diverged.append(f"{own} at step {error.step}")
            rest = "; the other runs go on" if index + 1 < len(configs) else ""
            progress.note(f"{config.recipe}, seed {config.seed}, diverged in {own}: {error}{rest}")
        except TrainingError as error:
            raise TrainingError(f"{own}: {error}") from error
        except Interrupted as error:
            where = f"{place}, {own.name}: " if place else ""
            raise Interrupted(f"{where}{error}", resumable=True, code=error.code) from error
        except KeyboardInterrupt as error:  # between two runs
            ended = index + _is_finished(own / RESULT, config)
            if not ended and not own.exists():
                raise
            left = [*map(run_name, configs[ended:]), "the comparison"]
            raise Interrupted(f"interrupted before {left[0]}", resumable=True) from error
        remarks = False
    if not diverged:
        return ""
    others = f" and {len(diverged) - 1} more" if len(diverged) > 1 else ""
    return (
        f"{len(diverged)} of {counted(len(configs), 'run')} diverged, {diverged[0]}{others}; "
        f"{remedy(configs[0])}, and give --out another folder"
    )


def run_name(config: TrainConfig) -> str:
    """Return the name of a run's folder among those of other recipes and seeds."""
    return f"{config.recipe}-{config.seed}"


def _is_finished(path: Path, config: TrainConfig) -> bool:
    return path.exists() and json.loads(path.read_text())["settings"] == dict(compared_fields(config))


def _picture(config: TrainConfig, corpus: Corpus, result: RunResult, resumed: int) -> bytes:
    rows, unit = [alone(result)], f"{corpus.unit}s"
    text = (
        f"lr {config.lr:g}, {config.batch_size} x {config.seq_len} {unit} a step, {unit} of {corpus.source}"
    )
    timed = config.device != "cpu"
    told = caption(rows, parameters=result.parameters, text=text, timed=timed)
    return draw(rows, subtitle=told, unit=corpus.unit, train=result.history.train, resumed=resumed)


def _summary(config: TrainConfig, corpus: Corpus, result: RunResult, ranks: Ranks) -> dict[str, object]:
    return {
        "machine": describe(config.device),
        "data": {"source": corpus.source, "digest": corpus.digest, "unit": corpus.unit},
        "settings": dict(compared_fields(config)),
        "parallel": {"mode": ranks.mode, "processes": ranks.count},
        "parameters": result.parameters,
        "held_out_loss": result.held_out_loss,
        "tokens_per_second": result.pace.tokens_per_second,
        "mfu": result.pace.mfu,
        "peak_memory": result.pace.memory,
        "seconds": result.seconds,
        "history": result.history.to_json(),
    }
