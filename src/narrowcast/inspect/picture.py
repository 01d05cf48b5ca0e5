"""The picture of a watch: layers down, steps across, one panel per operand and statistic."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._checks import shown
from .._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .watch import Record

_KINDS = ("input", "weight", "grad_output")
_MOST_LOST, _LEAST_SQNR = 0.1, 8.0
_LETTERS, _TITLE = 11, 13  # points
_WIDE, _NARROW = 7.6, 4.3  # inches: a screen, and a phone, which shows a pixel per point
_USUAL = (16, 33)
_PALE = "#388bfd30"
# What stands out should be looked at: too little SQNR, and too much, since one value that dwarfs the rest has nearly
# all of the signal, and the rest becomes 0: red, as in the panels of underflow. What is usual, from NVFP4's 16 dB to
# E4M3's 31, is pale, on light pages and on dark ones: a panel without color seemed to lack records.
_SIGNAL = {
    8: "#c2570cff",
    12: "#f1a340ff",
    16: _PALE,
    33: _PALE,
    36: "#e5484840",
    40: "#d42a2aff",
    44: "#d42a2aff",
}
_LOST = {0.0: _PALE, 0.1: "#e5484860", 1.0: "#d42a2aff"}
# title, whether it is a share, value of a record, ticks, words below the scale
_STATISTICS: tuple[tuple[str, bool, Any, tuple[float, ...], tuple[str, str, str]], ...] = (
    (
        "Signal to quantization noise (SQNR), dB",
        False,
        lambda one: one.sqnr if math.isfinite(one.sqnr) else _USUAL[1],  # no error at all is no outlier
        (8, 16, 24, 32, 40),
        ("noisy", "usual", "one outlier"),
    ),
    (
        "Underflow: values rounded to 0",
        True,
        lambda one: one.underflow,
        (0.0, 0.1, 0.25, 0.5, 1.0),
        ("none", "", "all"),
    ),
)
_BROKEN = "#d1242f"  # the name of a layer that loses many values or much signal
_REMEDY = "Remedy for a red layer: a recipe with a scale per block (Float8BlockScaling), or bf16."
_SEEN = 0.01  # a panel without a larger share looks empty, and says so


def draw(records: Sequence[Record], recipes: Sequence[str], path: str | Path) -> None:
    """Write the picture in the format that the name ends in.

    Raises:
        ValueError: matplotlib does not write it.
    """
    drawn = figure(records, recipes)
    ending, known = Path(path).suffix[1:].lower(), drawn.canvas.get_supported_filetypes()
    if ending and ending not in known:
        raise ValueError(f"path is {shown(str(path))}; end it in one of .{', .'.join(known)}")
    drawn.savefig(path, dpi=165, bbox_inches=drawn.bbox_inches.padded(0.12))  # with a margin


def figure(records: Sequence[Record], recipes: Sequence[str] = (), *, wide: bool = True) -> Figure:
    """Return the picture as matplotlib's figure, with the names of the layers' recipes below it.

    Args:
        records: what was watched.
        recipes: names.
        wide: for screens; else for phones.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
    from matplotlib.figure import Figure

    broken = _broken(records)
    names = list(dict.fromkeys((one.layer, _stage(one)) for one in records))
    steps = sorted({one.step for one in records})
    parts = zip(*(layer.split(".")[:-1] for layer, _ in names))
    shared = "".join(f"{part[0]}." for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts))
    labels = [f"{layer.removeprefix(shared)} {stage}".strip() for layer, stage in names]
    width, letters = (_WIDE, 90) if wide else (_NARROW, 46)  # inches, and letters of a line
    labels = [
        label if len(label) <= 20 else f"{label[:6]}\N{HORIZONTAL ELLIPSIS}{label[-13:]}" for label in labels
    ]
    height = 4.8 + 0.36 * max(len(names), 5)
    drawn = Figure(figsize=(width, height), layout="constrained")
    drawn.suptitle(
        textwrap.fill(_finding(broken), int(0.8 * letters)), x=0, ha="left", weight="bold", size=_TITLE
    )
    low, high = min(_SIGNAL), max(_SIGNAL)
    signal = [((decibels - low) / (high - low), color) for decibels, color in _SIGNAL.items()]
    # the root lets a hundredth be seen beside all
    lost = [(share**0.5, color) for share, color in _LOST.items()]
    scales = (
        (LinearSegmentedColormap.from_list("signal", signal), Normalize(low, high)),
        (LinearSegmentedColormap.from_list("lost", lost), PowerNorm(0.5, 0.0, 1.0)),
    )
    missing = False
    panels = drawn.subplots(len(_STATISTICS), len(_KINDS), sharex=True, sharey=True, squeeze=False)
    for row, (title, share, value, ticks, words), (colors, norm) in zip(panels, _STATISTICS, scales):
        for axes, kind in zip(row, _KINDS):
            table = [[math.nan] * len(steps) for _ in names]
            for one in records:
                if one.operand.endswith(kind):
                    table[names.index((one.layer, _stage(one)))][steps.index(one.step)] = value(one)
            found = [value for line in table for value in line if not math.isnan(value)]
            missing = missing or len(found) < len(names) * len(steps)
            axes.imshow(table, aspect="auto", cmap=colors.with_extremes(bad="#80808060"), norm=norm)
            axes.set_facecolor("none")
            axes.set_title(
                f"\n{kind}" if axes is not row[0] else f"\n\n{kind}", fontsize=_LETTERS, loc="left"
            )
            if told := _in_words(found, share):
                where = {"ha": "center", "va": "center", "fontsize": _LETTERS, "color": "0.35"}
                axes.text(0.5, 0.5, told, transform=axes.transAxes, **where)
            axes.set_yticks(range(len(names)), labels, fontsize=_LETTERS)
            for name, label in zip(names, axes.get_yticklabels()):
                if name in {(one.layer, _stage(one)) for one in broken}:
                    label.set(color=_BROKEN, weight="bold")
            labeled = range(0, len(steps), max(1, len(steps) // 2))
            axes.set_xticks(list(labeled), [str(steps[index]) for index in labeled], fontsize=_LETTERS)
            axes.tick_params(axis="x", labelbottom=True)
        above = {"xytext": (0, 25), "textcoords": "offset points", "fontsize": _LETTERS, "weight": "bold"}
        row[0].annotate(title, (0, 1), xycoords=(drawn.transFigure, "axes fraction"), **above).set_in_layout(
            False
        )  # over the row
        row[1].set_xlabel("step", fontsize=_LETTERS)
        bar = drawn.colorbar(
            row[0].images[0],
            ax=list(row),
            location="bottom",
            extend="neither" if share else "both",
            aspect=70 if wide else 40,
        )
        bar.set_ticks(list(ticks), labels=[f"{tick:.0%}" if share else f"{tick}" for tick in ticks])
        bar.ax.tick_params(labelsize=_LETTERS)
        for place, align, text in zip((0.0, 0.46, 1.0), ("left", "center", "right"), words):
            below = {"xytext": (0, -30), "textcoords": "offset points", "fontsize": _LETTERS, "ha": align}
            bar.ax.annotate(text, (place, 0), xycoords="axes fraction", **below)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # hundreds of parts otherwise
    told = [f"Recipe: {', '.join(recipes)}."] if recipes else []
    told += [_REMEDY] if broken else []
    told += [f"Down: layers{f' of {shared[:-1]}' if shared else ''}. Across: sampled steps."]
    told += ["Gray: no record."] if missing else []
    told += ["One outlier: one value has nearly all of the signal."]
    told += [f"narrowcast {__version__}, torch {torch.__version__}"]
    foot = textwrap.wrap(" ".join(told), letters)
    drawn.supxlabel("\n".join(foot), x=0, ha="left", fontsize=_LETTERS, color="0.35")
    drawn.set_figheight(height + 1.3 * _LETTERS / 72 * (len(foot) - 3))
    return drawn


def _in_words(found: Sequence[float], share: bool) -> str:
    """Return what a panel in which nothing stands out has."""
    if not found:
        return "no record"
    if share:
        return (f"all < {_SEEN:.0%}" if max(found) else "all 0%") if max(found) < _SEEN else ""
    low, high = _USUAL
    return "all usual" if low <= min(found) and max(found) <= high else ""


def _broken(records: Sequence[Record]) -> list[Record]:
    """Return the records that lose many of their values, else those that lose much of their signal."""
    lost = [one for one in records if one.underflow > _MOST_LOST]
    return lost or [one for one in records if one.sqnr < _LEAST_SQNR]


def _finding(found: Sequence[Record]) -> str:
    """Return the title: the operand that first loses many of its values or much of its signal."""
    if not found:
        return "No layer loses many values or much signal"
    first = min(found, key=lambda one: one.step)
    place = first.layer, first.operand
    named = f"Layer {first.layer}, {first.operand}" if first.layer else first.operand
    worst = max(one.underflow for one in found if (one.layer, one.operand) == place)
    lost = f"up to {worst:.0%} of the values become 0"
    told = lost if worst > _MOST_LOST else "much quantization error"
    more = len({(one.layer, one.operand) for one in found}) - 1
    others = f", and {more} more" if more else ""
    return f"{named}{others}: {told} from step {first.step}"


def _stage(one: Record) -> str:
    """ "fc1" or "fc2" of a block of two, else nothing."""
    first = one.operand.split("_")[0]
    return first if first.startswith("fc") else ""
