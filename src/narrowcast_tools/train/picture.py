"""The picture of a comparison: held-out loss per recipe, and beside it the gap to bfloat16."""

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import BASELINE, Row, judged

# Okabe and Ito's colors, told apart with every common color vision.
COLORS = {
    "bf16": "#000000",
    "delayed": "#E69F00",
    "current": "#0072B2",
    "rowwise": "#7F3C8D",
    "mxfp8": "#009E73",
    "block": "#CC79A7",
    "nvfp4": "#D55E00",
    "mxfp6": "#56B4E9",
    "mxfp4": "#8C6D1F",
}
LIMIT = 4 / 3  # of what the last step shows: the gaps of the first noisy evaluations may leave the panel
DASHES = ("-", "--", ":", "-.")  # distinguish one recipe's layer tables


TITLE = "A Transformer learns real text in every recipe"


def draw(rows: Sequence[Row], *, subtitle: str, title: str = TITLE, unit: str = "byte") -> bytes:
    """Draw a comparison; where a recipe has several seeds, their mean, and how far they lie apart.

    Args:
        rows: the comparison; the baseline among them.
        subtitle: what was trained, where.
        unit: what a token is called.

    Returns:
        a PNG image.
    """
    figure = Figure(figsize=(12, 5.2), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=15, weight="bold")
    losses, gaps = figure.subplots(1, 2, width_ratios=[1, 1.25])
    _draw_losses(losses, rows, unit)
    _draw_gaps(gaps, rows)
    figure.supxlabel(textwrap.fill(subtitle, 190), x=0.01, ha="left", size=8.5, color="0.35")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_losses(axes: Axes, rows: Sequence[Row], unit: str) -> None:
    _style(axes, f"Held-out loss, nats per {unit}" + (", mean of the seeds" if _several(rows) else ""))
    for row, dashes in zip(rows, _dashes(rows)):
        steps, losses = zip(*row.held_out)
        wide = row.recipe == BASELINE
        label = f"{row.title}  {row.held_out_loss:.3f}"
        axes.plot(
            steps,
            losses,
            dashes,
            color=COLORS[row.recipe],
            label=label,
            linewidth=4.5 if wide else 1.6,
            marker="o",
            markersize=6 if wide else 2.5,
            alpha=0.25 if wide else 0.95,
        )
    legend = axes.legend(title="recipe and final loss", frameon=False, loc="upper right", alignment="left")
    legend.get_title().set_color("0.35")


def _several(rows: Sequence[Row]) -> bool:
    return any(len(row.seeds) > 1 for row in rows)


def _draw_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.tolerance_percent is None)
    several = len(baseline.seeds) > 1
    _style(axes, "Gap to bf16 at the same step" + (" and seed" if several else "") + ", percent")
    last_step = baseline.held_out[-1][0]
    tolerances = sorted({row.tolerance_percent for row in rows if row.tolerance_percent}, reverse=True)
    shown = [
        *tolerances,
        *(abs(gap) for row in rows for gap in row.gaps[-1][2:]),
    ]  # ranges of the last step included
    limit = LIMIT * (max(shown, default=0.0) or 3.0)  # equal losses have no gap
    for percent in tolerances if judged(rows) else ():
        axes.hlines([-percent, percent], 0, last_step, color="#009E73", linewidth=1, linestyle="--")
        axes.text(
            0.01 * last_step, percent + 0.015 * limit, f"allowed: {percent:g}%", color="#007A5A", size=8
        )
    axes.plot([0, last_step], [0, 0], color=COLORS[BASELINE], alpha=0.25, linewidth=4.5)
    ends = []
    for row, dashes in zip(rows, _dashes(rows)):
        steps, percents, lowest, highest = zip(*row.gaps)
        color = COLORS[row.recipe]
        if row is baseline:
            if several:
                label = "bf16's seeds around their mean"
                axes.fill_between(steps, lowest, highest, color=color, alpha=0.1, linewidth=0, label=label)
            continue
        axes.plot(steps, percents, dashes, color=color, linewidth=1.6, marker="o", markersize=2.5)
        if len(row.seeds) > 1:  # bands of several recipes would hide each other
            beside = last_step * (1.015 + 0.012 * len(ends))
            axes.vlines(beside, lowest[-1], highest[-1], color=color, linewidth=2.5)
        ends.append((percents[-1], row))
    labels = 1.03
    if several:
        labels = 1.03 + 0.012 * len(ends)
        axes.vlines(
            [], 0, 0, color="0.35", linewidth=2.5, label="a recipe's lowest to highest seed, last step"
        )
        axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.set_ylim(-limit, limit)
    axes.set_xlim(0, last_step * (1.31 + labels - 1))
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= last_step])
    axes.spines["bottom"].set_bounds(0, last_step)
    heights = spread([min(max(end, -limit), limit) for end, _ in ends], apart=0.105 * limit)
    for height, (end, row) in zip(heights, ends):
        axes.annotate(
            signed_percent(row.title, end),
            xy=(last_step, min(max(end, -limit), limit)),
            xytext=(last_step * labels, height),
            color=COLORS[row.recipe],
            size=9,
            va="center",
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the grid
            # The line ends at the label's left edge; from the middle it would strike through others.
            arrowprops={
                "arrowstyle": "-",
                "color": COLORS[row.recipe],
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


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", size=11)
    axes.set_xlabel("optimizer step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
