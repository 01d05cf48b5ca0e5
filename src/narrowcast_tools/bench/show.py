"""The results as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..colors import color_of
from ..schemes import LETTERS, WIDTH, png, tell, wrap
from ..tables import make_table
from .measure import Result

HEADINGS = {"share": "time over compiled bf16", "memory": "peak MiB"}
COLUMNS = ("work", "contender", "mode", "ms", "share", "memory", "note")

ROW = 0.185  # inches: the height of a line of a label
EMULATED = "A CPU emulates the formats: its times say nothing of a GPU's"
OVER_THE_LINE = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # at 1
NAMES = 108  # points: the width of a contender's name


def table(results: Sequence[Result], title: str) -> Table:
    """Return a row per contender; the time is over that of bf16 compiled.

    Memory and notes are columns only if a result has any: a terminal of 80 columns is narrow.
    """
    columns = [
        name
        for name in COLUMNS
        if name not in ("memory", "note") or any(getattr(one, name) for one in results)
    ]
    headings = [HEADINGS.get(name, name) for name in columns]
    shown = make_table(headings, title, left=("contender", "mode", "note"))
    last = ""
    for one in results:
        if last and one.work != last:
            shown.add_section()
        texts = {
            "contender": one.contender,
            "mode": one.mode,
            "note": one.note,
            "work": "" if one.work == last else one.work,
            "ms": _number(one.ms, 3),
            "share": _number(one.share, 2),
            "memory": _number(one.memory, 0),
        }
        shown.add_row(*(texts[name] for name in columns))
        last = one.work
    return shown


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
            results[named] = Result(*named, float(row["ms"]), None, memory, row["note"])
    return results


def picture(results: Sequence[Result], caption: str, *, emulated: bool = False, total: int = 0) -> bytes:
    """Return bars of time and of memory over those of bf16, a group per work: a PNG image.

    A CPU has no memory figures, and its picture no panel for them.

    Args:
        caption: command and machine.
        emulated: whether a CPU was timed.
        total: how many measurements a complete run has.
    """
    panels = {"Time of a step": _bars(results, "ms"), "Peak memory": _bars(results, "memory")}
    panels = {title: bars for title, bars in panels.items() if bars or title == "Time of a step"}
    rows = [max(1, sum(bar.rows for bar in bars)) for bars in panels.values()]
    size = WIDTH, 0.75 * len(panels) + ROW * sum(rows)
    figure = Figure(figsize=size, dpi=190, layout="constrained")
    drawn = figure.subplots(len(panels), 1, height_ratios=rows, squeeze=False)[:, 0]
    for axes, (title, bars) in zip(drawn, panels.items()):
        axes.set_title(f"{title}\nover compiled bf16's", loc="left", size=LETTERS, weight="bold")
        _draw(axes, bars)
    longer = "Longer is slower" if len(panels) == 1 else "Longer is slower, or more memory"
    finding = EMULATED if emulated else _finding(results)
    if len(results) < total:
        finding = f"Partial: {len(results)} of {total} measurements\n{finding}"
    tell(figure, finding, f"{longer}.\n{caption}")
    return png(figure)


class Bar(NamedTuple):
    """A contender's bar, or with no length the name of the group of bars below it."""

    label: str
    color: str = ""
    length: float = 0.0
    told: str = ""

    @property
    def rows(self) -> float:
        """How many lines it takes."""
        return self.label.count("\n") + (1 if self.length else 1.5)


def _bars(results: Sequence[Result], column: Literal["ms", "memory"]) -> list[Bar]:
    """Return a column's bars over those of bf16, each work's below its name; none without one of bf16."""
    bars: list[Bar] = []
    for work in dict.fromkeys(one.work for one in results):
        values = {one: value for one in results if one.work == work and (value := getattr(one, column))}
        base = next((value for one, value in values.items() if one.contender == "bf16"), None)
        if base is None:
            continue
        bars.append(Bar(wrap(work, 72 * WIDTH)))
        for one, value in values.items():
            plain = f"{_short(value)} ms" if column == "ms" else f"{value:,.0f} MiB"
            told = f"{value / base:.2f} ({plain})"
            label = wrap(f"{one.contender}, {one.mode}", NAMES)
            bars.append(Bar(label, color_of(one.contender), value / base, told))
    return bars


def _short(value: float) -> str:
    """Return a number with three digits, and all that are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw bars below the name of their group."""
    labels: dict[float, str] = {}
    end = 0.0
    for bar in bars:
        end += bar.rows
        place = end - bar.label.count("\n") / 2
        if not bar.length:
            left = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            told = axes.annotate(bar.label, (0, place), (-NAMES - 5, 0), va="center", size=LETTERS, **left)
            told.set_bbox(OVER_THE_LINE)
            continue
        labels[place] = bar.label
        axes.barh(place, bar.length, 0.8, color=bar.color)
        told = axes.text(bar.length, place, f" {bar.told}", va="center_baseline", size=LETTERS)
        told.set_bbox(OVER_THE_LINE)
    axes.axvline(1.0, color=color_of("bf16"), linewidth=1, linestyle="--", zorder=0)
    axes.set_xticks([1.0], ["1: bf16, compiled"], size=LETTERS, color="0.35")
    axes.set_yticks(list(labels), list(labels.values()), size=LETTERS, color="0.35")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.margins(x=0.8)
    axes.set_xlim(left=0)
    axes.set_ylim(end + 0.6, 0.8)


def _finding(results: Sequence[Result]) -> str:
    """Return the title: the fastest contender, or how much longer all take."""
    shares = {one: one.share for one in results if one.share is not None and one.contender != "bf16"}
    if not shares:
        return "The time of a step in bf16" if any(one.ms for one in results) else "No step was measured"
    fastest = min(shares, key=shares.__getitem__)
    if shares[fastest] < 1:
        return f"Up to {1 / shares[fastest]:.2f} times as fast as compiled bf16: {fastest.contender}, {fastest.mode}"
    times = dict.fromkeys(f"{share:.2f}" for share in (shares[fastest], max(shares.values())))
    return f"No step is faster than compiled bf16's: they take {' to '.join(times)} times as long"
