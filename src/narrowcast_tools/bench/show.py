"""The results as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..colors import color_of
from ..schemes import LETTERS, WIDE, middles, png, tell, wrap
from ..tables import make_table
from .measure import Result

COLUMNS = ("work", "contender", "mode", "ms", "share", "memory", "note", "low", "high")
SHOWN = ("contender", "mode", "ms", "min..max", "share", "memory", "note")

ROW = 0.185  # inches: the height of a line of a label
EMULATED = "A CPU emulates the formats: its times say nothing of a GPU's. "
NAMES = 170  # points: the width of a contender's name


def table(results: Sequence[Result], title: str) -> Table:
    """Return a row per contender below the name of its work; the time is over that of bf16, the first row.

    Memory and notes are columns only if a result has any: a terminal of 80 columns is narrow.
    """
    columns = [
        name for name in SHOWN if name not in ("memory", "note") or any(getattr(one, name) for one in results)
    ]
    titles = {"share": f"time over {_mode(results)} bf16", "memory": "peak MiB"}
    headings = [titles.get(name, name) for name in columns]
    shown = make_table(headings, title, left=("mode", "note"))
    shown.columns[0].no_wrap = True
    last = ""
    for one in results:
        if one.work != last:
            if last:
                shown.add_section()
            shown.add_row(one.work)
        texts = {
            "contender": f"  {one.contender}",
            "mode": one.mode,
            "note": one.note,
            "ms": _number(one.ms, 3),
            "min..max": spread(one),
            "share": _number(one.share, 2),
            "memory": _number(one.memory, 0),
        }
        shown.add_row(*(texts[name] for name in columns))
        last = one.work
    return shown


def spread(result: Result) -> str:
    """Return the shortest and the longest round of a result, such as "0.117..0.131"; "" without a time."""
    return (
        f"{result.low:,.3f}..{result.high:,.3f}" if result.low is not None and result.high is not None else ""
    )


def _mode(results: Sequence[Result]) -> str:
    """Return the mode of the bf16 that times are compared with: the first of the rows."""
    return next((one.mode for one in results if one.contender == "bf16"), "compiled")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def write_csv(results: Sequence[Result], path: Path, machine: dict[str, str]) -> None:
    """Write the results, each row with the machine it was measured on."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *machine])
        writer.writerows([*one, *machine.values()] for one in results)


def read_csv(path: Path, machine: dict[str, str]) -> dict[tuple[str, str, str], Result]:
    """Return earlier results of this machine and these versions, by work, contender and mode."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    results: dict[tuple[str, str, str], Result] = {}
    for row in rows:
        if row["ms"] and all(row[key] == machine[key] for key in machine if key != "date"):
            named = row["work"], row["contender"], row["mode"]
            memory = float(row["memory"]) if row["memory"] else None
            rounds = (float(row[name]) if row.get(name) else None for name in ("low", "high"))
            results[named] = Result(*named, float(row["ms"]), None, memory, row["note"], *rounds)
    return results


def picture(results: Sequence[Result], caption: str, *, emulated: bool = False, total: int = 0) -> bytes:
    """Return bars of time and of memory over those of bf16, a group per work: a PNG image.

    A CPU has no memory figures, and its picture no panel for them.

    Args:
        caption: command and machine.
        emulated: whether a CPU was timed.
        total: how many measurements a complete run has.
    """
    lines, mode = list(_lines(results)), _mode(results)
    panels: dict[str, Literal["ms", "memory"]] = {f"Time ({mode} bf16: 1)": "ms"}
    if any(one.memory for one in results):
        panels[f"Memory ({mode} bf16: 1)"] = "memory"
    size = WIDE, 0.8 + ROW * sum(line.height for line in lines)
    figure = Figure(figsize=size, dpi=200, layout="constrained")
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, column) in zip(drawn, panels.items()):
        axes.set_title(title, loc="left", size=LETTERS, weight="bold")
        _draw(axes, lines, column)
        axes.margins(x=0.5 * len(panels))  # room for numbers
        axes.set_xlim(left=0)
    _name(drawn[0], lines)
    finding = _finding(results, " on this CPU" * emulated)
    if len(results) < total:
        finding = f"Partial: {len(results)} of {total} measurements"
    tell(figure, finding, f"Shorter is better. {EMULATED * emulated}{caption}")
    return png(figure)


class Line(NamedTuple):
    """A contender's result beside that of bf16, or without one the name of the group of lines below it."""

    label: str
    result: Result | None = None
    base: Result | None = None

    @property
    def height(self) -> float:
        """How many lines of text it takes."""
        return self.label.count("\n") + (1.2 if self.result else 1.8)


def _lines(results: Sequence[Result]) -> Iterator[Line]:
    """Yield the name of each work of which bf16 was measured, and its results."""
    for work in dict.fromkeys(one.work for one in results):
        measured = [one for one in results if one.work == work and one.ms]
        base = next((one for one in measured if one.contender == "bf16"), None)
        if base is not None:
            yield Line(wrap(work, 72 * WIDE))
            for one in measured:
                yield Line(wrap(f"{one.contender}, {one.mode}", NAMES), one, base)


def _short(value: float) -> str:
    """Return a number with three digits, and all that are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _places(lines: Sequence[Line]) -> list[float]:
    """Return how far down the middle of each line is."""
    return middles([line.height for line in lines])


def _draw(axes: Axes, lines: Sequence[Line], column: Literal["ms", "memory"]) -> None:
    """Draw a column's bars over those of bf16."""
    for place, (_, result, base) in zip(_places(lines), lines):
        value, whole = (getattr(one, column) if one else None for one in (result, base))
        if result is None or not value or not whole:
            continue
        axes.barh(place, value / whole, 0.8, color=color_of(result.contender))
        plain = f"{_short(value)} ms" if column == "ms" else f"{value:,.0f} MiB"
        told = f" {value / whole:.2f} ({plain})"
        axes.text(value / whole, place, told, va="center_baseline", size=LETTERS)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)


def _name(axes: Axes, lines: Sequence[Line]) -> None:
    """Write the lines' names left of a panel, and those of groups on their left."""
    places = _places(lines)
    named = {place: line.label for place, line in zip(places, lines) if line.result}
    axes.set_yticks(list(named), list(named.values()), size=LETTERS, color="0.35")
    axes.set_ylim(sum(line.height for line in lines) + 0.2, 0)
    left = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    for place, line in zip(places, lines):
        if not line.result:
            axes.annotate(
                line.label, (0, place), (-NAMES - 5, -3), va="center", size=LETTERS, weight="bold", **left
            )


def _finding(results: Sequence[Result], where: str) -> str:
    """Return the title: the contender that is the fastest in every group, bf16 included; else what is drawn."""
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for one in results:
        if one.share is not None:
            groups[one.work].append((one.share, f"{one.contender} ({one.mode})"))
    base, best = _mode(results), [min(group) for group in groups.values()]
    names = {name for _, name in best}
    if len(names) != 1:
        return f"Time of a step as a multiple of {base} bf16's" if names else "No step was measured"
    (name,) = names
    told = f"Fastest{where}{' in every group' * (len(groups) > 1)} is {name}"
    times = dict.fromkeys(f"{share:.2f}" for share in (min(best)[0], max(best)[0]))
    return told if name == f"bf16 ({base})" else f"{told}: {' to '.join(times)} times {base} bf16's time"
