"""How a run shows itself: a bar with loss and time left on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from .pace import Pace, format_pace

QUIET_SECONDS = 10.0  # longest silence of the plain form


class Progress:
    """What a run tells; this one keeps it to itself, as all but one of several processes do."""

    def begin(self, title: str, *, done: int, total: int) -> None:
        """The run begins, or goes on, at ``done`` of ``total`` steps."""

    def step(self, done: int, loss: float, pace: Pace) -> None:
        """A step is done."""

    def evaluated(self, done: int, loss: float) -> None:
        """The held-out text was tried."""

    def note(self, text: str) -> None:
        """Something that people should know."""

    def end(self) -> None:
        """The run ends, however it does."""


class Bar(Progress):
    """A progress bar for terminals."""

    def __init__(self, console: Console) -> None:
        self._rich = RichProgress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  held-out {task.fields[held_out]}  {task.fields[speed]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self._rich.add_task("", visible=False, loss="-", held_out="-", speed="")

    def begin(self, title: str, *, done: int, total: int) -> None:
        self._rich.start()
        self._task = self._rich.add_task(title, completed=done, total=total, loss="-", held_out="-", speed="")

    def step(self, done: int, loss: float, pace: Pace) -> None:
        speed = format_pace(pace).replace("MFU unknown  ", "")  # a terminal's line is short
        self._rich.update(self._task, completed=done, loss=f"{loss:.3f}", speed=speed)

    def evaluated(self, done: int, loss: float) -> None:
        self._rich.update(self._task, completed=done, held_out=f"{loss:.3f}")

    def note(self, text: str) -> None:
        self._rich.console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        self._rich.stop()


class Lines(Progress):
    """One line per evaluation, and one whenever `QUIET_SECONDS` passed without."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._total = 0
        self._first = 0
        self._began = 0.0
        self._last_line = 0.0
        self._loss = "-"
        self._speed = ""

    def begin(self, title: str, *, done: int, total: int) -> None:
        self._title, self._total, self._first = title, total, done
        self._loss, self._speed = "-", ""
        self._began = self._last_line = time.monotonic()

    def step(self, done: int, loss: float, pace: Pace) -> None:
        self._loss, self._speed = f"{loss:.3f}", format_pace(pace)
        if time.monotonic() - self._last_line >= QUIET_SECONDS:
            self._line(done, "")

    def evaluated(self, done: int, loss: float) -> None:
        self._line(done, f"  held-out {loss:.3f}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def _line(self, done: int, held_out: str) -> None:
        self._last_line = time.monotonic()
        left = ""
        if done > self._first:
            per_step = (self._last_line - self._began) / (done - self._first)
            left = f"  left {format_duration(per_step * (self._total - done))}"
        speed = f"  {self._speed}" if self._speed else ""
        self._print(f"{self._title:<8} step {done}/{self._total}  loss {self._loss}{held_out}{speed}{left}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def make_progress(console: Console, *, silent: bool = False) -> Progress:
    """Return a bar where the console is a terminal, plain lines where it is a file or a pipe."""
    if silent:
        return Progress()
    return Bar(console) if console.is_terminal else Lines(console)


def format_duration(seconds: float) -> str:
    """Return minutes and seconds, such as 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
