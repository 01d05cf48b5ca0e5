"""The picture of a benchmark: each kernel's share of a copy's bandwidth, beside its peers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from narrowcast_tools.colors import PEERS, RECIPES, color_of

from .contenders import COPY, RATIOS, SWEEP

OURS = RECIPES["current"][0]  # the kernel's name says which recipe it belongs to
RESULTS = Path(__file__).parents[1] / "results"
# The target share of a kernel, by the first part of its name that matches.
TARGETS: dict[str, tuple[tuple[str, float], ...]] = {
    "quantize": (
        ("nvfp4 RHT + SR", 0.0),
        ("given scale", 0.90),
        ("current", 0.88),
        ("128-block", 0.85),
        ("mxfp8", 0.85),
        ("nvfp4 RHT", 0.60),
    ),
    "activation": (("", 0.85),),
    "norm": (("", 0.85),),
}
TITLES = {
    "quantize": "Quantizing bf16 in both directions",
    "dequantize": "Dequantizing to bf16",
    "transpose": "Transposing FP8 codes",
    "activation": "SwiGLU, quantized in both directions",
    "norm": "RMSNorm, quantized in both directions",
}

NOTES = {
    "norm": "rmsnorm: forward; add+rmsnorm: with the sum of the residual; drmsnorm: backward.\n"
    "unfused: the norm's kernel, then the quantizing one.\n"
}

Row = dict[str, str]


def plot(path: Path, folder: Path | None = None) -> Path | None:
    """Draw ``<folder>/<stem>.png`` from the newest commit's rows of ``<stem>.csv``.

    Args:
        path: the rows.
        folder: where the picture goes; None means beside the rows.

    Returns:
        The picture's path; None where the rows have no share of a copy's bandwidth.
    """
    rows = [row for row in newest(path) if {"shape", "kernel", "share"} <= row.keys()]
    rows = [row for row in rows if row["kernel"] != COPY and not row["kernel"].startswith(SWEEP)]
    if not rows:
        return None
    picture = (folder or path.parent) / f"{path.stem}.png"
    _draw(path.stem, rows).savefig(picture, dpi=150)
    return picture


def newest(path: Path) -> list[Row]:
    """Return the rows of the last commit and device; of equal measurements the last."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    same = [row for row in rows if all(row.get(key) == rows[-1].get(key) for key in ("commit", "device"))]
    return list({(row.get("shape"), row.get("kernel")): row for row in same}.values()) if same else []


def day(commit: str) -> str:
    """Return the day of a commit as text that goes on a line; nothing for an unknown commit."""
    with (RESULTS / "commits.csv").open(newline="") as file:
        days = {row["commit"]: row["date"] for row in csv.DictReader(file)}
    return f", {days[commit]}" if commit in days else ""


def target(stem: str, kernel: str) -> float:
    """Return the target share of a kernel, 0 without a target."""
    return next((share for part, share in TARGETS.get(stem, ()) if part in kernel), 0.0)


def split_peer(name: str) -> tuple[str, str]:
    """Return peer and kernel: ``torchao: fp8 current`` -> (``torchao``, ``fp8 current``); no peer for narrowcast."""
    peer, separator, kernel = name.partition(": ")
    return (peer, kernel) if separator and peer in RATIOS else ("", name)


def _draw(stem: str, rows: Sequence[Row]) -> Figure:
    shares = {(row["shape"], *split_peer(row["kernel"])): float(row["share"]) for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    kernels = list(dict.fromkeys(kernel for _, _, kernel in shares))
    peers = [peer for peer in PEERS if any(found == peer for _, found, _ in shares)]
    names = {row["shape"]: row.get("name") or "" for row in rows}

    # A kernel without a measured peer takes less room than one with several.
    lines = {
        kernel: ["", *(p for p in peers if any((s, p, kernel) in shares for s in shapes))]
        for kernel in kernels
    }
    heights = {kernel: 1.0 + 0.55 * (len(found) - 1) + 0.55 for kernel, found in lines.items()}
    across = min(len(shapes), 2)  # more would be too narrow for a phone
    down = -(-len(shapes) // across)
    figure = Figure(
        figsize=(5.8 + 2.4 * across, down * (0.21 * sum(heights.values()) + 0.6) + 1.6), layout="constrained"
    )
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in panels.flat[len(shapes) :]:
        axes.set_visible(False)
    limit = max(1.0, *shares.values())
    for axes, shape in zip(panels.flat, shapes):
        size = shape.replace("x", "\N{MULTIPLICATION SIGN}")
        _panel(axes, ", ".join(filter(None, (size, names[shape]))), limit)
        top = 0.0
        for kernel in kernels:
            _bars(
                axes, stem, kernel, {peer: shares.get((shape, peer, kernel)) for peer in lines[kernel]}, top
            )
            top += heights[kernel]
        axes.set_ylim(top - 0.3, -0.75)
    tops = [sum(list(heights.values())[:index]) for index in range(len(kernels))]
    for axes in panels[:, 0]:
        axes.set_yticks(tops, [kernel.replace("->", "→") for kernel in kernels])
    figure.legend(
        handles=_legend(stem, kernels, peers),
        title=TITLES.get(stem, stem),
        title_fontproperties={"size": 15, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    where = rows[-1]
    figure.supxlabel(
        f"{NOTES.get(stem, '')}Higher is better. The copy on the device was timed in the same rounds.\n"
        f"{where['device']}, PyTorch {where['torch']}, Triton {where['triton']}, "
        f"narrowcast {where['narrowcast']}{day(where['commit'])}",
        x=0.01,
        ha="left",
        size=8.5,
        color="0.35",
    )
    return figure


def _panel(axes: Axes, title: str, limit: float) -> None:
    axes.set_title(title, loc="left", size=10)
    axes.set_xlabel("share of a copy's bandwidth", size=9)
    axes.set_xlim(0, 1.03 * limit)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "", "0.5", "", "1"])
    axes.axvline(1.0, color="0.6", linewidth=0.9, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.93", linewidth=0.8)
    axes.set_axisbelow(True)


def _bars(axes: Axes, stem: str, kernel: str, shares: dict[str, float | None], top: float) -> None:
    """Draw narrowcast's bar with its number and its target, and the peers' thinner bars below."""
    wanted = target(stem, kernel)
    y = top
    for peer, share in shares.items():
        bar = 0.92 if not peer else 0.48
        if share is not None:
            color = color_of(peer) if peer else OURS
            axes.barh(y, share, height=bar, color=color, linewidth=0)
            # At the left end, where no target's mark can cover it.
            inside = not peer and share > 0.16
            axes.text(
                0.015 if inside else share + 0.015,
                y,
                f"{share:.2f}",
                va="center",
                color=_ink(color) if inside else "0.1" if not peer else "0.4",
                size=7 if peer else 8.5,
                weight="normal" if peer else "bold",
            )
        y += 0.78 if not peer else 0.55
    if wanted and shares.get("") is not None:
        axes.plot([wanted, wanted], [top - 0.46, top + 0.46], color="black", linewidth=1.6, zorder=3)


def _ink(color: str) -> str:
    """Return the color of text on a bar."""
    red, green, blue = to_rgb(color)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _legend(stem: str, kernels: Sequence[str], peers: Sequence[str]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [Patch(color=OURS, label="narrowcast")]
    handles += [Patch(color=color_of(peer), label=peer) for peer in peers]
    if any(target(stem, kernel) for kernel in kernels):
        mark = {"marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": ""}
        handles.append(Line2D([], [], color="black", label="target: what narrowcast aims for", **mark))
    return handles
