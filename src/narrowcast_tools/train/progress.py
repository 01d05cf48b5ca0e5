"""Progress of a run: a bar with loss and time left on a terminal, plain lines elsewhere."""

import textwrap
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from .pace import Pace, format_pace

QUIET_SECONDS = 10.0  # longest silence of the plain form
NARROWEST_BAR = 8  # cells
ROOM = "00:00"  # of a time
TITLE = len("delayed")
SPEED = len("34,558 tok/s")
HELD_OUT = len("held-out 5.545")
TIMED_STEPS = 2  # least number for the time left: the first step compiles and warms up


class Progress:
    """The output of a run; this one prints nothing, as in all but one of several processes."""

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        """The run begins, or goes on, at ``done`` of ``total`` steps; runs after it have ``further`` steps."""

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        """A step is done. ``evaluates``: the held-out text is tried next."""

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

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        # A new one for each run: one that starts again prints the lines of the runs before it once more.
        self._rich = RichProgress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Figures(self._console),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            *((_AllRuns(),) if further else ()),
            console=self._console,
            expand=True,
        )
        self._rich.start()
        fields = {"loss": "-", "held_out": "-", "pace": Pace(0.0), "further": further}
        self._task = self._rich.add_task(title, completed=done, total=total, **fields)

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._rich.update(self._task, completed=done, loss=f"{loss:.3f}", pace=pace)

    def evaluated(self, done: int, loss: float) -> None:
        self._rich.update(self._task, completed=done, held_out=f"{loss:.3f}")

    def note(self, text: str) -> None:
        _note(self._console, text)

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
            f"{f', all runs {ROOM}' if task.fields['further'] else ''}"
        )
        pace = format_pace(task.fields["pace"])
        while pace and len(f"{others}{losses}  {pace}") > self._console.width:
            pace = pace.rpartition("  ")[0]
        return Text(f"{losses}  {pace}".rstrip())


class _AllRuns(ProgressColumn):
    """The time left of this run and of those after it, at this run's speed."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        if task.speed is None or task.remaining is None:
            return Text("")
        left = (task.remaining + task.fields["further"]) / task.speed
        return Text(f"all runs {format_duration(left)}")


class Lines(Progress):
    """One line per evaluation, and one whenever `QUIET_SECONDS` passed without."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._total = 0
        self._further = 0
        self._timed: tuple[int, float] | None = None  # the first step, and when it was done
        self._last_line = 0.0
        self._loss = "-"
        self._pace = Pace(0.0)

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        self._title, self._total, self._further = title, total, further
        self._loss, self._pace, self._timed = "-", Pace(0.0), None
        self._last_line = time.monotonic()

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._loss, self._pace, now = f"{loss:.3f}", pace, time.monotonic()
        self._timed = self._timed or (done, now)
        if now - self._last_line >= QUIET_SECONDS and not evaluates:  # the evaluation has a line of its own
            self._line(done, "")

    def evaluated(self, done: int, loss: float) -> None:
        self._line(done, f"held-out {loss:.3f}")

    def note(self, text: str) -> None:
        _note(self._console, text)

    def _line(self, done: int, held_out: str) -> None:
        """Print figures in columns, with as much of the speed as the console has room for."""
        self._last_line = time.monotonic()
        left = ""
        first, at = self._timed or (done, 0.0)
        if done >= first + TIMED_STEPS:
            per_step, steps = (self._last_line - at) / (done - first), self._total - done
            left = f"  left {format_duration(per_step * steps)}"
            if self._further:
                left += f", all {format_duration(per_step * (steps + self._further))}"
        begin = f"{self._title:<{TITLE}}  step {done:>{len(str(self._total))}}/{self._total}"
        begin += f"  loss {self._loss:<5}  {held_out:<{HELD_OUT}}"
        room = (
            self._console.width - len(begin) - len(f"  left {ROOM}{f', all {ROOM}' if self._further else ''}")
        )
        pace = format_pace(self._pace)
        pace = f"  {pace:>{len(pace) + max(0, SPEED - pace.find('  '))}}" if pace else ""
        while len(pace) > room:
            pace = pace.rpartition("  ")[0].rstrip()
        self._print(f"{begin}{pace}{left}".rstrip())

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _note(console: Console, text: str) -> None:
    """Print a note in lines of the console's width; a path or an option stays whole."""
    lines = textwrap.fill(
        f"note: {text}",
        console.width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print(lines, highlight=False, markup=False, soft_wrap=True)


def make_progress(console: Console, *, silent: bool = False) -> Progress:
    """Return a bar where the console is a terminal, plain lines where it is a file or a pipe."""
    if silent:
        return Progress()
    return Bar(console) if console.is_terminal else Lines(console)


def format_duration(seconds: float) -> str:
    """Return minutes and seconds, such as 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
