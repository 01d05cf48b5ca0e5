"""The picture of a comparison: each recipe's gap to bfloat16 at the last step, and at every evaluation."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from narrowcast._checks import counted

from ..colors import color_of
from ..schemes import WIDTH, png, tell
from .report import BASELINE, Row, judged

LIMIT = 6 / 5  # of what the last step shows: the gaps of the first noisy evaluations may leave the panel
ALLOWED = "#2e9e5b"  # its tint stands on light pages and on dark ones
DASHES = ("-", "--", ":", "-.")  # distinguish one recipe's layer tables

TERMS = "Held-out: not trained on. bf16: 16-bit training; recipes: fewer bits."
ON_A_CPU = "A CPU emulates the formats: losses as on a GPU, no speeds. "


def draw(rows: Sequence[Row], *, subtitle: str, unit: str = "byte") -> bytes:
    """Return a PNG image of ``figure``."""
    return png(figure(rows, subtitle=subtitle, unit=unit))


def figure(rows: Sequence[Row], *, subtitle: str, unit: str = "byte") -> Figure:
    """Draw a comparison: the finding, each recipe's last gap beside the allowed one, and the gaps over the steps.

    Args:
        rows: the comparison; the baseline among them.
        subtitle: what was trained, where.
        unit: what a token is called.
    """
    last = 1.2 + 0.27 * len(rows)
    drawn = Figure(figsize=(WIDTH, last + 4.8), dpi=250, layout="constrained")
    ends, curves = drawn.subplots(2, 1, height_ratios=[last, 3.2])
    _draw_last_gaps(ends, rows, unit)
    _draw_gaps(curves, rows)
    tell(drawn, finding(rows), f"{TERMS}\n{subtitle}")
    return drawn


def finding(rows: Sequence[Row]) -> str:
    """Return the title: whether the recipes' losses count as equal to bf16's."""
    above = [row.title for row in rows if not row.within]
    if len(rows) == 1:
        return f"{rows[0].title} learns the text"
    if not judged(rows):
        return "Losses beside bf16's, after too few steps to judge a recipe"
    if not above:
        return "Every recipe's loss is within the allowed gap to bf16"
    return f"Above the allowed gap to bf16: {', '.join(above)}"


def _draw_last_gaps(axes: Axes, rows: Sequence[Row], unit: str) -> None:
    """Draw a line of dots per recipe beside the gap that is allowed, and write gap and loss right of it."""
    baseline = next(row for row in rows if row.recipe == BASELINE)
    (_, first), (last_step, last) = baseline.held_out[0], baseline.held_out[-1]
    fell = f"fell from {first:.2f} to {last:.2f}" if len(baseline.held_out) > 1 else f"is {last:.2f}"
    _style(axes, f"Gap after {last_step} steps, percent", "x")
    shown = [end for row in rows for end in row.gaps[-1][1:]]
    allowed = {row.tolerance_percent for row in rows if row.tolerance_percent and judged(rows)}
    bound = 1.12 * (max(map(abs, (*shown, *allowed))) or 1.0)
    axes.axvline(0, color=color_of(BASELINE), linewidth=1, linestyle="--")
    same = len({tuple(row.seeds) for row in rows}) == 1  # else a loss is of other seeds than bf16's beside it
    for place, row in enumerate(rows):
        color = color_of(row.recipe)
        if judged(rows) and row.tolerance_percent is not None:
            axes.barh(
                place,
                bound + row.tolerance_percent,
                left=-bound,
                height=1.0,
                color=ALLOWED,
                alpha=0.13,
                linewidth=0,
            )
        if len(row.seeds) > 1:
            axes.hlines(place, *row.gaps[-1][2:], color=color, linewidth=4, alpha=0.5)
        axes.plot(row.gap_percent, place, "o", color=color, markersize=6)
        gap = "" if row is baseline else signed_percent(row.gap_percent)
        _beside(axes, place, gap, f"{row.held_out_loss:.3f}" if same else "", color="0.15")
    _beside(axes, -0.9, "gap", "loss" if same else "", color="0.35")
    several = any(len(row.seeds) > 1 for row in rows)
    axes.set_yticks(
        range(len(rows)),
        [f"{row.title}, {counted(len(row.seeds), 'seed')}" if several else row.title for row in rows],
        size=9,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-bound, bound)
    told = [f"right of 0: worse than bf16, whose held-out loss\n{fell} nats per {unit}"]
    if allowed:
        least, most = min(allowed), max(allowed)
        wide = ", ".join(row.title for row in rows if row.tolerance_percent == most) if most > least else ""
        told.append(f"green: counts as equal, up to {least:g}%" + (f" ({wide}: {most:g}%)" if wide else ""))
    if several:
        told.append("dot: mean of the seeds, each against bf16's of the same seed")
        told.append("line: lowest to highest; of bf16: its seeds around their mean")
    elif len(rows) > 1:
        told.append("one seed cannot rank recipes")
    axes.set_xlabel("\n".join(told), size=9)


def _beside(axes: Axes, place: float, *told: str, color: str) -> None:
    """Write a line of a table right of the panel."""
    for column, text in enumerate(told):
        where = {
            "xycoords": axes.get_yaxis_transform(),
            "textcoords": "offset points",
            "annotation_clip": False,
        }
        right = (52 + 40 * column, 0)
        axes.annotate(text, (1, place), right, ha="right", va="center", size=9, color=color, **where)


def _draw_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.tolerance_percent is None)
    several = len(baseline.seeds) > 1
    _style(axes, "Gap over the steps, percent; above 0 is worse")
    axes.set_xlabel("optimizer step", size=9)
    last_step = baseline.held_out[-1][0]
    tolerances = sorted({row.tolerance_percent for row in rows if row.tolerance_percent and judged(rows)})
    # The second half of each curve and bf16's band at the last step are inside.
    shown = [gap[1] for row in rows for gap in row.gaps[len(row.gaps) // 2 :]] + list(baseline.gaps[-1][2:])
    if tolerances and max(map(abs, shown)) < tolerances[0]:  # a small gap shall look small
        shown += [-tolerances[0], tolerances[0]]
    low, high = min(0.0, *shown), max(0.0, *shown)
    room = (LIMIT - 1) * ((high - low) or 3.0)  # equal losses have no gap
    low, high = low - room, high + room
    for percent, dashes in zip(tolerances, ("--", ":")):
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
                widest = max(map(abs, (*lowest, *highest)))
                label = "bf16's seeds around their mean" + (f", to {widest:.1f}%" if widest > high else "")
                axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0, label=label)
            continue
        axes.plot(steps, percents, dashes, color=color, linewidth=1.6, marker="o", markersize=2.5)
        ends.append((percents[-1], row))
    if axes.get_legend_handles_labels()[0]:  # below the curves, which it would cover
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(-0.05, -0.17), fontsize=9)
    axes.set_ylim(low, high)
    axes.set_xlim(0, last_step)
    axes.locator_params(axis="x", nbins=5)
    heights = spread([min(max(end, low), high) for end, _ in ends], apart=0.085 * (high - low))
    for height, (end, row) in zip(heights, ends):
        axes.annotate(
            row.title,
            xy=(last_step, min(max(end, low), high)),
            xytext=(last_step * 1.05, height),
            color="0.15",
            size=9,
            va="center",
            annotation_clip=False,
            # The line ends at the label's left edge; from the middle it would strike through others.
            arrowprops={
                "arrowstyle": "-",
                "color": color_of(row.recipe),
                "linewidth": 1.5,
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


def signed_percent(percent: float) -> str:
    """Return a label such as `+0.31%`, with a real minus sign."""
    return f"{percent:+.2f}%".replace("-", "\N{MINUS SIGN}")


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
    axes.set_title(title, loc="left", size=10)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
