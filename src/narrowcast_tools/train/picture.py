"""The picture of a comparison: each recipe's last held-out loss, and its gap to bfloat16 at every evaluation."""

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from narrowcast._checks import counted

from ..colors import color_of
from .report import BASELINE, Row, judged

RANGES = 1.48  # of the last step: the lines of the seeds, right of the labels
LIMIT = 6 / 5  # of what the last step shows: the gaps of the first noisy evaluations may leave the panel
DASHES = ("-", "--", ":", "-.")  # distinguish one recipe's layer tables


ON_A_CPU = "A CPU emulates the formats: losses as on a GPU, no speeds. "
TITLE = "A Transformer learns real text in every recipe"


def draw(rows: Sequence[Row], *, subtitle: str, title: str = TITLE, unit: str = "byte") -> bytes:
    """Return a PNG image of ``figure``."""
    image = io.BytesIO()
    figure(rows, subtitle=subtitle, title=title, unit=unit).savefig(image, format="png")
    return image.getvalue()


def figure(rows: Sequence[Row], *, subtitle: str, title: str = TITLE, unit: str = "byte") -> Figure:
    """Draw a comparison. With several seeds, a recipe's mean is a large dot, and its seeds show how far they lie apart.

    Args:
        rows: the comparison; the baseline among them.
        subtitle: what was trained, where.
        unit: what a token is called.
    """
    ends = 0.9 + 0.27 * len(rows)
    drawn = Figure(figsize=(7, ends + 4.6), dpi=175, layout="constrained")
    drawn.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    losses, gaps = drawn.subplots(2, 1, height_ratios=[ends, 3.9])
    _draw_losses(losses, rows, unit)
    _draw_gaps(gaps, rows)
    drawn.supxlabel(textwrap.fill(subtitle, 100), x=0.01, ha="left", size=8.5, color="0.35")
    return drawn


def _draw_losses(axes: Axes, rows: Sequence[Row], unit: str) -> None:
    """Draw a line of dots per recipe: curves of all steps would lie on each other."""
    baseline = next(row for row in rows if row.recipe == BASELINE)
    (_, first), (last_step, _) = baseline.held_out[0], baseline.held_out[-1]
    # The gap of a recipe with fewer seeds counts from another mean of bf16 than the first row's.
    uneven = len({len(row.seeds) for row in rows}) > 1
    fell = f", bf16 fell from {first:.2f}" if len(baseline.held_out) > 1 else ""
    _style(axes, f"Held-out loss after {last_step} steps, nats per {unit}{fell}", "x")
    axes.axvline(baseline.held_out_loss, color=color_of(BASELINE), linewidth=1, linestyle="--")
    for place, row in enumerate(rows):
        color = color_of(row.recipe)
        if len(row.seeds) > 1:
            axes.hlines(place, *row.spread, color=color, linewidth=2.5, alpha=0.5)
        axes.plot(row.held_out_loss, place, "o", color=color, markersize=8)
        if uneven:
            same = row.held_out_loss / (1 + row.gap_percent / 100)
            if row is not baseline:
                axes.plot(same, place, "|", color=color_of(BASELINE), markersize=14, markeredgewidth=2)
            end, told = max(row.spread[1], same), f"  {counted(len(row.seeds), 'seed')}"
            axes.text(end, place, told, va="center", size=8)
    axes.set_yticks(range(len(rows)), [f"{row.title}  {row.held_out_loss:.3f}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    if _several(rows):
        same = "\ngray tick: bf16's mean over the same seeds, from which the gap counts" if uneven else ""
        told = f"dot: mean of the seeds; line: lowest to highest seed; dashed: bf16's mean{same}"
        axes.set_xlabel(told, size=9)
    elif len(rows) > 1:
        axes.set_xlabel("dashed: bf16; one seed is too short a comparison to rank recipes", size=9)


def _several(rows: Sequence[Row]) -> bool:
    return any(len(row.seeds) > 1 for row in rows)


def _draw_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.tolerance_percent is None)
    several = len(baseline.seeds) > 1
    _style(
        axes,
        "Gap to bf16 at the same step" + (" and seed" if several else "") + ", percent; above 0 is worse",
    )
    axes.set_xlabel("optimizer step")
    last_step = baseline.held_out[-1][0]
    tolerances = sorted({row.tolerance_percent for row in rows if row.tolerance_percent}, reverse=True)
    later = [gap for row in rows for gap in row.gaps[len(row.gaps) // 2 :]]
    # The second half of each curve and of bf16's band, and the ranges of the last step are inside.
    shown = [gap[1] for gap in later] + [end for row in rows for end in row.gaps[-1][2:]]
    shown += [end for gap in baseline.gaps[len(baseline.gaps) // 2 :] for end in gap[2:]]
    low, high = min(0.0, *shown), max(0.0, *shown)
    room = (LIMIT - 1) * ((high - low) or 3.0)  # equal losses have no gap
    low, high = low - room, high + room
    for percent, dashes in zip(tolerances, (":", "--")) if judged(rows) else ():
        if percent < high:
            held = [row.title for row in rows if row.tolerance_percent == percent]
            told = f"{f'{held[0]}: ' if len(held) == 1 else ''}up to {percent:g}% counts as equal"
            axes.hlines(percent, 0, last_step, color="0.45", linewidth=1, linestyle=dashes, label=told)
    axes.plot([0, last_step], [0, 0], color=color_of(BASELINE), alpha=0.5, linewidth=3)
    ends = []
    for row, dashes in zip(rows, _dashes(rows)):
        steps, percents, lowest, highest = zip(*row.gaps)
        color = color_of(row.recipe)
        if row is baseline:
            if several:
                label = "bf16's seeds around their mean"
                axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0, label=label)
            continue
        axes.plot(steps, percents, dashes, color=color, linewidth=1.6, marker="o", markersize=2.5)
        if len(row.seeds) > 1:  # bands of several recipes would hide each other
            beside = last_step * (RANGES + 0.014 * len(ends))
            axes.vlines(beside, lowest[-1], highest[-1], color=color, linewidth=2.5)
        ends.append((percents[-1], row))
    width = 1.43
    if several:
        width = RANGES + 0.014 * len(ends)
        axes.vlines(
            [], 0, 0, color="0.35", linewidth=2.5, label="a recipe's lowest to highest seed, last step"
        )
    if axes.get_legend_handles_labels()[0]:  # below the curves, which it would cover
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2, fontsize=8)
    axes.set_ylim(low, high)
    axes.set_xlim(0, last_step * width)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= last_step])
    axes.spines["bottom"].set_bounds(0, last_step)
    heights = spread([min(max(end, low), high) for end, _ in ends], apart=0.06 * (high - low))
    for height, (end, row) in zip(heights, ends):
        axes.annotate(
            signed_percent(row.title, end),
            xy=(last_step, min(max(end, low), high)),
            xytext=(last_step * 1.03, height),
            color=color_of(row.recipe),
            size=9,
            va="center",
            annotation_clip=False,
            # The line ends at the label's left edge; from the middle it would strike through others.
            arrowprops={
                "arrowstyle": "-",
                "color": color_of(row.recipe),
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 2,
            },
        )


def _dashes(rows: Sequence[Row]) -> list[str]:
    seen: Counter[str] = Counter()
    dashes = []
    for row in rows:
        dashes.append(DASHES[seen[row.recipe] % len(DASHES)])
        seen[row.recipe] += 1
    return dashes


def signed_percent(title: str, percent: float) -> str:
    """Return a label such as `MXFP8 +0.31%`, with a real minus sign."""
    return f"{title} {percent:+.2f}%".replace(" -", " \N{MINUS SIGN}")


def spread(heights: Sequence[float], *, apart: float) -> list[float]:
    """Move labels up or down as little as needed so that no two come closer than a distance.

    Args:
        heights: requested positions, in any order.
        apart: smallest distance between two labels.

    Returns:
        positions in the order of `heights`, centered on their cluster's requested ones.
    """

    def bottom(cluster: Sequence[int]) -> float:
        return fmean(heights[i] for i in cluster) - apart * (len(cluster) - 1) / 2

    order = sorted(range(len(heights)), key=lambda i: heights[i])
    clusters: list[list[int]] = []
    for index in order:
        clusters.append([index])
        while len(clusters) > 1 and bottom(clusters[-2]) + apart * len(clusters[-2]) > bottom(clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    placed = list(heights)
    for cluster in clusters:
        for rank, index in enumerate(cluster):
            placed[index] = bottom(cluster) + rank * apart
    return placed


def _style(axes: Axes, title: str, grid: Literal["x", "y"] = "y") -> None:
    axes.set_title(title, loc="left", size=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
