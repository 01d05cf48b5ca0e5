"""The picture of a watch: layers down, steps across, one panel per operand and statistic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .watch import Record

_KINDS = ("input", "weight", "grad_output")
# title, unit, value of a record, color map, limits. What stands out should be looked at: too little SQNR, and too
# much, since one value that dwarfs the rest has nearly all of the signal.
_STATISTICS: tuple[tuple[str, str, Any, str, tuple[float, float]], ...] = (
    (
        "SQNR, signal over error. Orange: much error. Dark violet: one value dwarfs the others.",
        "dB; both ends are bad",
        lambda one: one.sqnr,
        "PuOr",
        (8.0, 44.0),
    ),
    (
        "Underflow. Red: many values that were not 0 became 0.",
        "share of the values; more is worse",
        lambda one: one.underflow,
        "Reds",
        (0.0, 0.1),
    ),
)


def draw(records: Sequence[Record], path: str | Path) -> None:
    """Write the picture in the format that the name ends in."""
    figure(records).savefig(path, dpi=120)


def figure(records: Sequence[Record]) -> Figure:
    """Return the picture as matplotlib's figure."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((one.layer, _stage(one)) for one in records))
    steps = sorted({one.step for one in records})
    height = 1.6 + 0.42 * max(len(names), 4)
    drawn = Figure(figsize=(6.8, height), layout="constrained")
    title = "Quantization error of each layer's operands over the steps"
    drawn.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
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
            axes.set_title(f"\n{kind}", fontsize=9, loc="left")
            axes.set_yticks(
                range(len(names)), [f"{layer} {stage}".strip() for layer, stage in names], fontsize=8
            )
            shown = range(0, len(steps), max(1, len(steps) // 4))
            axes.set_xticks(list(shown), [str(steps[index]) for index in shown], fontsize=8)
            axes.tick_params(axis="x", labelbottom=True)
        above = {"xytext": (0, 20), "textcoords": "offset points", "fontsize": 9}
        row[0].annotate(title, (0, 1), xycoords="axes fraction", **above).set_in_layout(False)  # over the row
        extend = "both" if limits[0] else "max"
        bar = drawn.colorbar(row[0].images[0], ax=list(row), label=unit, extend=extend)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # hundreds of parts otherwise
    gaps = "; gray: no record" if missing else ""
    drawn.supxlabel(f"step{gaps}; narrowcast {__version__}, torch {torch.__version__}", fontsize=9)
    return drawn


def _stage(one: Record) -> str:
    """ "fc1" or "fc2" of a block of two, else nothing."""
    first = one.operand.split("_")[0]
    return first if first.startswith("fc") else ""
