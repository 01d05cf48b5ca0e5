"""The picture of a watch: layers down, steps across, one panel per operand and statistic."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .watch import Record

_KINDS = ("input", "weight", "grad_output")
_MOST_LOST, _LEAST_SQNR = 0.1, 8.0
# title, unit, value of a record, color map, limits. What stands out should be looked at: too little SQNR, and too
# much, since one value that dwarfs the rest has nearly all of the signal.
_STATISTICS: tuple[tuple[str, str, Any, str, tuple[float, float]], ...] = (
    (
        "SQNR: signal over quantization error.\nOrange: much error. Dark violet: one value dwarfs the others.",
        "SQNR, dB; both ends are bad",
        lambda one: one.sqnr,
        "PuOr",
        (_LEAST_SQNR, 44.0),
    ),
    (
        "Underflow: values that were not 0 become 0.\nRed: many do.",
        "share of values; more is worse",
        lambda one: one.underflow,
        "Reds",
        (0.0, _MOST_LOST),
    ),
)


def draw(records: Sequence[Record], path: str | Path) -> None:
    """Write the picture in the format that the name ends in."""
    drawn = figure(records)
    drawn.savefig(path, dpi=165, bbox_inches=drawn.bbox_inches.padded(0.12))  # with a margin


def figure(records: Sequence[Record]) -> Figure:
    """Return the picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((one.layer, _stage(one)) for one in records))
    steps = sorted({one.step for one in records})
    height = 2.4 + 0.42 * max(len(names), 4)
    drawn = Figure(figsize=(4.9, height), layout="constrained")
    drawn.suptitle(textwrap.fill(_finding(records), 46), x=0, ha="left", weight="bold", size=12)
    missing = False
    panels = drawn.subplots(len(_STATISTICS), len(_KINDS), sharex=True, sharey=True, squeeze=False)
    for row, (title, unit, value, colors, limits) in zip(panels, _STATISTICS):
        for axes, kind in zip(row, _KINDS):
            table = [[math.nan] * len(steps) for _ in names]
            for one in records:
                if one.operand.endswith(kind):
                    table[names.index((one.layer, _stage(one)))][steps.index(one.step)] = value(one)
            missing = missing or any(math.isnan(value) for line in table for value in line)
            axes.imshow(table, aspect="auto", cmap=colors, vmin=limits[0], vmax=limits[1])
            axes.set_facecolor("0.8")
            axes.set_title(f"\n\n\n{kind}", fontsize=9, loc="left")
            axes.set_yticks(
                range(len(names)), [f"{layer} {stage}".strip() for layer, stage in names], fontsize=9
            )
            shown = range(0, len(steps), max(1, len(steps) // 3))
            axes.set_xticks(list(shown), [str(steps[index]) for index in shown], fontsize=9)
            axes.tick_params(axis="x", labelbottom=True)
        above = {"xytext": (0, 22), "textcoords": "offset points", "fontsize": 9}
        row[0].annotate(title, (0, 1), xycoords="axes fraction", **above).set_in_layout(False)  # over the row
        row[1].set_xlabel("step", fontsize=9)
        extend = "both" if limits[0] else "max"
        bar = drawn.colorbar(row[0].images[0], ax=list(row), extend=extend, aspect=30)
        bar.set_label(unit, fontsize=9)
        bar.ax.tick_params(labelsize=9)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # hundreds of parts otherwise
    gaps = "; gray: no record" if missing else ""
    foot = (
        f"A row is a layer, a column a sampled step{gaps}.\nThe panels are what the layer's GEMMs multiply.\n"
        f"narrowcast {__version__}, torch {torch.__version__}"
    )
    drawn.supxlabel(foot, x=0, ha="left", fontsize=9, color="0.35")
    return drawn


def _finding(records: Sequence[Record]) -> str:
    """Return the title: the operand that first loses many of its values or much of its signal."""
    lost = [one for one in records if one.underflow > _MOST_LOST]
    found = lost or [one for one in records if one.sqnr < _LEAST_SQNR]
    if not found:
        return "No layer loses many values or much signal"
    first = min(found, key=lambda one: one.step)
    place = first.layer, first.operand
    named = f"Layer {first.layer}, {first.operand}" if first.layer else first.operand
    worst = max(one.underflow for one in found if (one.layer, one.operand) == place)
    told = f"up to {worst:.0%} of the values become 0" if lost else "much quantization error"
    more = len({(one.layer, one.operand) for one in found}) - 1
    others = f", and {more} more" if more else ""
    return f"{named}{others}: {told} from step {first.step}"


def _stage(one: Record) -> str:
    """ "fc1" or "fc2" of a block of two, else nothing."""
    first = one.operand.split("_")[0]
    return first if first.startswith("fc") else ""
