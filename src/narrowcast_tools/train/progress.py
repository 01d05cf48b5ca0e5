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
BRISK_SECONDS = 3.0  # evaluations that follow a line sooner have none, besides the first and the last
NARROWEST_BAR = 6  # cells
TITLE = len("delayed")
LOSS, HELD_OUT = len("loss 5.545"), len("held-out 5.545")
TIME = len("59:59")
FIGURES = len("loss 5.545  held-out 5.545  left 59:59")
SPEED = (len("34,558 tok/s"), len("3.0 GiB"), len("MFU 41.4%"))
TIMED_STEPS = 2  # least number for the time left: the first step compiles and warms up


class Progress:
    """The output of a run; this one prints nothing, as in all but one of several processes."""

    def begin(self, title: str, *, done: int, total: int, place: str = "") -> None:
        """The run begins, or goes on, at ``done`` of ``total`` steps. ``place``: among several, such as "run 2/7"."""

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        """A step is done. ``evaluates``: the held-out text is tried next."""

    def evaluated(self, done: int, loss: float) -> None:
        """The held-out text was tried."""

    def note(self, text: str) -> None:
        """Something that people should know."""

    def end(self) -> None:
        """The run ends, however it does."""


class _Layout:
    """The columns of figures, the same in every line of a command: a figure that is not known yet is a dash.

    Args:
        width: of a line.
        crops: whether no line may be wider; otherwise only the speed is left out where there is no room.
    """

    def __init__(self, width: int, *, crops: bool) -> None:
        self._width, self._crops = width, crops
        self._begin = 0
        self._place = ""

    def begin(self, begin: int, place: str) -> None:
        """A run begins, whose lines have ``begin`` characters before the figures."""
        self._begin, self._place = begin, f", {place}" if place else ""

    def room(self) -> int:
        """Return the characters that the figures without the speed leave of a line."""
        return self._width - self._begin - FIGURES - len(self._place)

    def figures(self, loss: str, held_out: str, pace: Pace, time: str) -> str:
        """Return the figures that there is room for.

        Args:
            loss, held_out: with the word before the number, or what is done instead.
            time: that is left of this run, with the word before it.
        """
        figures = [
            f"{loss:<{LOSS}}",
            f"  {held_out:<{HELD_OUT}}",
            f"  {time}",
            self._place,
        ]
        always = 0 if self._crops else len(figures)
        parts = format_pace(pace).split("  ") if pace.tokens_per_second else []
        figures += [f"  {part:>{width}}" for width, part in zip(SPEED, [*parts, *3 * [""]])]
        told = ""
        for index, figure in enumerate(figures):
            if index >= always and self._begin + len(told) + len(figure) > self._width:
                break
            told += figure
        return told


def _time(word: str, seconds: float | None) -> str:
    """Return a time in `TIME` characters after a word; None if it is not known."""
    if seconds is None:
        return f"{word} {'-':>{TIME}}"
    minutes = int(seconds) // 60
    told = f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 600 else f"{minutes // 60}h"
    return f"{word} {format_duration(seconds) if minutes < 100 else told:>{TIME}}"


class Bar(Progress):
    """A progress bar for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._layout = _Layout(console.width, crops=True)

    def begin(self, title: str, *, done: int, total: int, place: str = "") -> None:
        title = f"{title:<{TITLE}} "
        width = len(title) + len(f"{total}/{total}") + 2
        self._layout.begin(width, place)
        if bar := self._layout.room() > NARROWEST_BAR:
            self._layout.begin(width + NARROWEST_BAR + 1, place)
        # A new one for each run: one that starts again prints the lines of the runs before it once more.
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=None)] if bar else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Figures(self._layout),
            console=self._console,
            expand=bar,
        )
        self._rich.start()
        # A run begins with an evaluation, and a resumed one with a step.
        loss, held_out = ("first step", "held-out -") if done else ("loss -", "evaluating")
        fields = {"loss": loss, "held_out": held_out, "pace": Pace(0.0), "stepped": False}
        self._task = self._rich.add_task(title, completed=done, total=total, **fields)

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._rich.update(self._task, completed=done, loss=f"loss {loss:.3f}", pace=pace, stepped=True)
        if evaluates:
            self._rich.update(self._task, held_out="evaluating")

    def evaluated(self, done: int, loss: float) -> None:
        self._rich.update(self._task, completed=done, held_out=f"held-out {loss:.3f}")
        if done == 0:
            self._rich.update(self._task, loss="first step")

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
        left = (task.remaining or 0) / task.speed if task.speed else None
        # The first step may compile for minutes: a clock shows that it goes on.
        time = _time("left", left) if task.fields["stepped"] else _time("busy", task.elapsed)
        loss, held_out, pace = (task.fields[name] for name in ("loss", "held_out", "pace"))
        return Text(self._layout.figures(loss, held_out, pace, time))


class Lines(Progress):
    """One line per evaluation unless they come faster than `BRISK_SECONDS`, and one whenever `QUIET_SECONDS` passed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._layout = _Layout(console.width, crops=False)
        self._title = ""
        self._total = 0
        self._timed: tuple[int, float] | None = None  # the first step, and when it was done
        self._last_line = 0.0
        self._loss = "-"
        self._pace = Pace(0.0)

    def begin(self, title: str, *, done: int, total: int, place: str = "") -> None:
        self._title, self._total = title, total
        self._layout.begin(len(self._begin_of(done)), place)
        self._loss, self._pace, self._timed = "-", Pace(0.0), None
        self._last_line = time.monotonic()

    def step(self, done: int, loss: float, pace: Pace, *, evaluates: bool = False) -> None:
        self._loss, self._pace, now = f"{loss:.3f}", pace, time.monotonic()
        self._timed = self._timed or (done, now)
        if now - self._last_line >= QUIET_SECONDS and not evaluates:  # the evaluation has a line of its own
            self._line(done, "", now)

    def evaluated(self, done: int, loss: float) -> None:
        now = time.monotonic()
        if done in (0, self._total) or now - self._last_line >= BRISK_SECONDS:
            self._line(done, f"held-out {loss:.3f}", now)

    def note(self, text: str) -> None:
        _note(self._console, text)

    def _begin_of(self, done: int) -> str:
        return f"{self._title:<{TITLE}}  step {done:>{len(str(self._total))}}/{self._total}  "

    def _line(self, done: int, held_out: str, now: float) -> None:
        self._last_line = now
        first, at = self._timed or (done, 0.0)
        timed = done >= first + TIMED_STEPS
        left = (now - at) / (done - first) * (self._total - done) if timed else None
        figures = self._layout.figures(f"loss {self._loss}", held_out, self._pace, _time("left", left))
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
