"""Progress of a run: a bar with loss and time left on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from .pace import Pace, format_pace

QUIET_SECONDS = 10.0  # longest silence of the plain form
NARROWEST_BAR = 8  # cells


class Progress:
    """The output of a run; this one prints nothing, as in all but one of several processes."""

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
        self._console = console

    def begin(self, title: str, *, done: int, total: int) -> None:
        # A new one for each run: one that starts again prints the lines of the runs before it once more.
        self._rich = RichProgress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Figures(self._console),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._rich.start()
        fields = {"loss": "-", "held_out": "-", "pace": Pace(0.0)}
        self._task = self._rich.add_task(title, completed=done, total=total, **fields)

    def step(self, done: int, loss: float, pace: Pace) -> None:
        self._rich.update(self._task, completed=done, loss=f"{loss:.3f}", pace=pace)

    def evaluated(self, done: int, loss: float) -> None:
        self._rich.update(self._task, completed=done, held_out=f"{loss:.3f}")

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        self._rich.stop()


class _Figures(ProgressColumn):
    """The losses and as much of the speed as the terminal has room for.

    rich shortens every column of a line that is too long, which turns numbers into others.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))  # the bar gives way, not the figures
        self._console = console

    def render(self, task: Task) -> Text:
        losses = f"loss {task.fields['loss']}  held-out {task.fields['held_out']}"
        left = 5 if (task.time_remaining or 0) < 3600 else 7
        others = (
            f"{task.description:<8} {'':{NARROWEST_BAR}} {task.total:.0f}/{task.total:.0f}  left {'':{left}}"
        )
        pace = _short_pace(task.fields["pace"])
        while pace and len(f"{others}{losses}  {pace}") > self._console.width:
            pace = pace.rpartition("  ")[0]
        return Text(f"{losses}  {pace}".rstrip())


def _short_pace(pace: Pace) -> str:
    return format_pace(pace).replace("MFU unknown  ", "")  # a line of progress is short


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
        self._loss, self._speed = f"{loss:.3f}", _short_pace(pace)
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
