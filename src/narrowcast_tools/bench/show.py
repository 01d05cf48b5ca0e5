"""The results as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from ..colors import color_of
from ..schemes import png
from ..tables import make_table
from .measure import Result

HEADINGS = {"share": "time over bf16", "memory": "peak MiB"}
COLUMNS = ("work", "contender", "mode", "ms", "share", "memory", "note")


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


def picture(results: Sequence[Result], title: str) -> bytes:
    """Return bars of time and of memory over those of bf16, a group per work: a PNG image.

    A CPU has no memory figures, and its picture no panel for them.
    """
    works = list(dict.fromkeys(one.work for one in results))
    base = {one.work: one for one in results if one.contender == "bf16"}
    names = ["time over bf16 compiled"]
    if any(first.memory for first in base.values()):
        names.append("peak memory over bf16 compiled")
    figure = Figure(figsize=(11, 1.4 + 0.28 * len(results)), dpi=130, layout="constrained")
    figure.suptitle(title.replace(": ", "\n", 1), x=0.01, ha="left", weight="bold", size=11)
    columns = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    labels: list[str] = []
    place = 0.0
    for work in works:
        for one in (one for one in results if one.work == work and one.ms is not None):
            labels.append(f"{one.contender}, {one.mode}" if one.contender != "bf16" else f"{work}: bf16")
            first = base.get(work)
            values = [one.share, None]
            if first is not None and first.memory and one.memory is not None:
                values[1] = one.memory / first.memory
            for axes, value in zip(columns, values):
                axes.barh(place, value or 0.0, color=color_of(one.contender))
                if value:
                    told = axes.text(value, place, f" {value:.2f}", va="center", size=7)
                    told.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0})  # over the line at 1
            place += 1
    for axes, name in zip(columns, names):
        axes.set_title(name, size=9, loc="left")
        axes.axvline(1.0, color="0.6", lw=0.8, zorder=0)
        axes.margins(x=0.08, y=0.01)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_yticks(range(len(labels)), labels, size=7)
    columns[0].invert_yaxis()
    return png(figure)
