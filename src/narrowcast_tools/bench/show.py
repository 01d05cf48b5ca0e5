"""The results as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from .measure import Result

COLUMNS = ("work", "contender", "mode", "ms", "share", "memory", "note")


def table(results: Sequence[Result], title: str) -> Table:
    """A row per contender; ``share`` is of the time of bf16 compiled, ``memory`` in MiB."""
    shown = Table(title=title, title_justify="left")
    for name in COLUMNS:
        shown.add_column(name, justify="right" if name in ("ms", "share", "memory") else "left")
    last = ""
    for one in results:
        if last and one.work != last:
            shown.add_section()
        shown.add_row(
            "" if one.work == last else one.work,
            one.contender,
            one.mode,
            _number(one.ms, 3),
            _number(one.share, 2),
            _number(one.memory, 0),
            one.note,
        )
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
    """What was measured before on this machine and with these versions, by work, contender and mode."""
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
    """Bars of time and of memory over those of bf16, a group per work: a PNG image."""
    works = list(dict.fromkeys(one.work for one in results))
    figure = Figure(figsize=(11, 1.2 + 0.28 * len(results)), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    base = {one.work: one for one in results if one.contender == "bf16"}
    columns = figure.subplots(1, 2, sharey=True)
    labels: list[str] = []
    place = 0.0
    for work in works:
        for one in (one for one in results if one.work == work and one.ms is not None):
            labels.append(f"{one.contender}, {one.mode}" if one.contender != "bf16" else f"{work}: bf16")
            color = (
                "#000000" if one.contender == "bf16" else "#0072B2" if " " not in one.contender else "#E69F00"
            )
            first = base.get(work)
            values = [one.share, None]
            if first is not None and first.memory and one.memory is not None:
                values[1] = one.memory / first.memory
            for axes, value in zip(columns, values):
                axes.barh(place, value or 0.0, color=color)
                if value:
                    axes.text(value, place, f" {value:.2f}", va="center", size=7)
            place += 1
    for axes, name in zip(columns, ("time over bf16 compiled", "peak memory over bf16 compiled")):
        axes.set_title(name, size=9, loc="left")
        axes.axvline(1.0, color="0.6", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_yticks(range(len(labels)), labels, size=7)
    columns[0].invert_yaxis()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
