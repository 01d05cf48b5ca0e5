"""Figures of a run for TensorBoard."""

from pathlib import Path
from typing import Any

from ..words import pip_install
from .config import TrainConfig
from .errors import SettingsError
from .pace import Pace
from .progress import Progress
from .schedule import learning_rate


class Board(Progress):
    """A progress that also writes TensorBoard's files; what a resumed run does again replaces what was there.

    Args:
        shown: where it is shown besides.
        folder: gets the files.
        config: of the run.

    Raises:
        SettingsError: the package tensorboard is missing.
    """

    def __init__(self, shown: Progress, folder: Path, config: TrainConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"--tensorboard needs the package tensorboard; run: {pip_install('tensorboard')}"
            ) from error
        self._make: Any = SummaryWriter
        self._shown, self._folder, self._config = shown, folder, config
        self._writer: Any = None

    def begin(self, title: str, *, done: int, total: int, place: str = "") -> None:
        self._shown.begin(title, done=done, total=total, place=place)
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._shown.step(done, loss, pace, evaluates=evaluates)
        config = self._config
        values = {
            "loss/train": loss,
            "learning rate": learning_rate(
                done - 1, peak=config.lr, warmup=config.warmup, steps=config.steps
            ),
            "memory/GiB": pace.memory / 2**30,
        }
        if pace.tokens_per_second:
            values["speed/tokens per second"] = pace.tokens_per_second
        if pace.mfu is not None:
            values["speed/MFU"] = pace.mfu
        for name, value in values.items():
            self._writer.add_scalar(name, value, done)

    def evaluated(self, done: int, loss: float) -> None:
        self._shown.evaluated(done, loss)
        self._writer.add_scalar("loss/held-out", loss, done)

    def note(self, text: str) -> None:
        self._shown.note(text)

    def end(self) -> None:
        self._shown.end()
        if self._writer is not None:
            self._writer.close()
