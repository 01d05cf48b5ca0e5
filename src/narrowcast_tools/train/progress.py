"""Progress of a run: a bar with loss and time left on a terminal, plain lines elsewhere."""

import textwrap
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from .pace import Pace, format_pace

QUIET_SECONDS = 10.0  # longest silence of the plain form
NARROWEST_BAR = 6  # cells
TITLE = len("delayed")
LOSS = len("5.545")
TIME = len("59:59")
SPEED = (len("34,558 tok/s"), len("3.0 GiB"), len("MFU 41.4%"))
TIMED_STEPS = 2  # least number for the time left: the first step compiles and warms up


class Progress:
    """The output of a run; this one prints nothing, as in all but one of several processes."""

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        """The run begins, or goes on, at ``done`` of ``total`` steps; later ones take as long as ``further`` steps."""

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        """A step is done. ``evaluates``: the held-out text is tried next."""

    def evaluated(self, done: int, loss: float) -> None:
        """The held-out text was tried."""

    def note(self, text: str) -> None:
        """Something that people should know."""

    def end(self) -> None:
        """The run ends, however it does."""


class _Layout:
    """The columns of figures, the same in every line of a command: a figure that is not known yet is a dash."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._several = False
        self._further: int = 0
        self._begin = 0

    def begin(self, begin: int, further: int) -> None:
        """A run begins, whose lines have ``begin`` characters before the figures."""
        self._begin, self._further = begin, further
        self._several = self._several or further != 0

    def figures(self, loss: str, held_out: str, pace: Pace, per_step: float | None, steps: int) -> str:
        """Return the figures, and as much of the speed as there is room for.

        Args:
            loss, held_out: a number, or a dash; an empty held-out loss leaves its place empty.
            per_step: seconds; None if not known.
            steps: that are left of this run.
        """
        told = f"loss {loss:<{LOSS}}  {f'held-out {held_out}' if held_out else '':<{len('held-out ') + LOSS}}"
        told += f"  left {_time(per_step, steps)}"
        if self._several:
            time_of_all = _time(per_step, steps + self._further)
            fits = self._begin + len(told) + len(", all runs ") + TIME <= self._width
            told += f", all {'runs ' if fits else ''}{time_of_all}"
        parts = format_pace(pace).split("  ") if pace.tokens_per_second else []
        for width, part in zip(SPEED, [*parts, *3 * [""]]):
            if self._begin + len(told) + 2 + max(width, len(part)) > self._width:
                break
            told += f"  {part:>{width}}"
        return told


def _time(per_step: float | None, steps: int) -> str:
    """Return the time of some steps in `TIME` characters."""
    if per_step is None:
        return f"{'-':>{TIME}}"
    seconds = per_step * steps
    minutes = int(seconds) // 60
    told = f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 600 else f"{minutes // 60}h"
    return f"{format_duration(seconds) if minutes < 100 else told:>{TIME}}"


class Bar(Progress):
    """A progress bar for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._layout = _Layout(console.width)

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        title = f"{title:<{TITLE}} "
        self._layout.begin(len(title) + NARROWEST_BAR + len(f"{total}/{total}") + 3, further)
        # A new one for each run: one that starts again prints the lines of the runs before it once more.
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Figures(self._layout),
            console=self._console,
            expand=True,
        )
        self._rich.start()
        fields = {"loss": "-", "held_out": "-", "pace": Pace(0.0)}
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
    """The figures of a run. rich would shorten a column that is too long, which turns numbers into others."""

    def __init__(self, layout: _Layout) -> None:
        super().__init__(Column(no_wrap=True))  # the bar gives way, not the figures
        self._layout = layout

    def render(self, task: Task) -> Text:
        per_step = 1 / task.speed if task.speed else None
        loss, held_out, pace = (task.fields[name] for name in ("loss", "held_out", "pace"))
        return Text(self._layout.figures(loss, held_out, pace, per_step, int(task.remaining or 0)))


class Lines(Progress):
    """One line per evaluation, and one whenever `QUIET_SECONDS` passed without."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._layout = _Layout(console.width)
        self._title = ""
        self._total = 0
        self._timed: tuple[int, float] | None = None  # the first step, and when it was done
        self._last_line = 0.0
        self._loss = "-"
        self._pace = Pace(0.0)

    def begin(self, title: str, *, done: int, total: int, further: int = 0) -> None:
        self._title, self._total = title, total
        self._layout.begin(len(self._begin_of(done)), further)
        self._loss, self._pace, self._timed = "-", Pace(0.0), None
        self._last_line = time.monotonic()

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._loss, self._pace, now = f"{loss:.3f}", pace, time.monotonic()
        self._timed = self._timed or (done, now)
        if now - self._last_line >= QUIET_SECONDS and not evaluates:  # the evaluation has a line of its own
            self._line(done, "")

    def evaluated(self, done: int, loss: float) -> None:
        self._line(done, f"{loss:.3f}")

    def note(self, text: str) -> None:
        _note(self._console, text)

    def _begin_of(self, done: int) -> str:
        return f"{self._title:<{TITLE}}  step {done:>{len(str(self._total))}}/{self._total}  "

    def _line(self, done: int, held_out: str) -> None:
        self._last_line = time.monotonic()
        first, at = self._timed or (done, 0.0)
        timed = done >= first + TIMED_STEPS
        per_step = (self._last_line - at) / (done - first) if timed else None
        figures = self._layout.figures(self._loss, held_out, self._pace, per_step, self._total - done)
        self._print(f"{self._begin_of(done)}{figures}".rstrip())

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
