"""The picture of a comparison: each recipe's gap to bfloat16 at the last step, and at every evaluation."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..colors import color_of
from ..schemes import WIDTH, png, tell
from .report import BASELINE, Row, judged

LIMIT = 6 / 5  # of what the last step shows: the gaps of the first noisy evaluations may leave the panel
ALLOWED = "#2e9e5b"  # its tint stands on light pages and on dark ones
TINT = 0.13
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
    drawn = Figure(figsize=(WIDTH, last + 4.6), dpi=250, layout="constrained")
    ends, curves = drawn.subplots(2, 1, height_ratios=[last, 2.6])
    _draw_last_gaps(ends, rows)
    _draw_gaps(curves, rows)
    tell(drawn, finding(rows), f"{_terms(rows, unit)}\n{subtitle}", _keys(rows))
    return drawn


def finding(rows: Sequence[Row]) -> str:
    """Return the title: whether the recipes' losses count as equal to bf16's."""
    above = [row.title for row in rows if not row.within]
    if len(rows) == 1:
        return f"{rows[0].title} learns the text"
    if not judged(rows):
        return "Losses beside bf16's, after too few steps to judge a recipe"
    if not above:
        return f"{'On average, every' if _several(rows) else 'Every'} recipe's loss counts as equal to bf16's"
    return f"{'Mean loss' if _several(rows) else 'Loss'} not equal to bf16's: {', '.join(above)}"


def _several(rows: Sequence[Row]) -> bool:
    return any(len(row.seeds) > 1 for row in rows)


def _allowed(rows: Sequence[Row]) -> dict[float, list[str]]:
    """Return the gaps that count as equal, smallest first, and the recipes of each; none of runs too short to judge."""
    allowed: dict[float, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.tolerance_percent or 0.0):
        if row.tolerance_percent is not None and judged(rows):
            allowed.setdefault(row.tolerance_percent, []).append(row.title)
    return allowed


def _terms(rows: Sequence[Row], unit: str) -> str:
    baseline = next(row for row in rows if row.recipe == BASELINE)
    (_, first), (_, last) = baseline.held_out[0], baseline.held_out[-1]
    told = [f"{TERMS} bf16's held-out loss"]
    told.append(f"fell from {first:.2f} to {last:.2f}" if len(baseline.held_out) > 1 else f"is {last:.2f}")
    told.append(f"nats per {unit}")
    if len(baseline.seeds) > 1:
        low, high = baseline.spread
        told.append(
            f"on average; its seeds end {high / baseline.held_out_loss - low / baseline.held_out_loss:.1%} apart"
        )
    return f"{' '.join(told)}."


def _keys(rows: Sequence[Row]) -> list[Artist]:
    """Return the legend: what a mark is, and whose rule the green ground is."""
    keys: list[Artist] = []
    if _several(rows):
        mark = {"color": "0.45", "linewidth": 0}
        keys.append(
            Line2D(
                [], [], marker="o", markersize=5, label="one seed, against bf16's run of that seed", **mark
            )
        )
        mean = "mean of a recipe's seeds"
        keys.append(Line2D([], [], marker="|", markersize=10, markeredgewidth=2.5, label=mean, **mark))
    if allowed := _allowed(rows):
        least, *wider = allowed
        told = f"counts as equal, by this project's rule: {'mean ' * _several(rows)}gap up to\n{least:g}%"
        told += "".join(f"; {', '.join(allowed[percent])}: {percent:g}%" for percent in wider)
        inside = [
            row.title for row in rows if row.within and row.gap_percent > (row.tolerance_percent or 0.0)
        ]
        told += f"\n{', '.join(inside)}: more, but no higher than bf16's highest seed" if inside else ""
        keys.append(Patch(color=ALLOWED, alpha=2 * TINT, linewidth=0, label=told))
    return keys


def _draw_last_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a line of dots per recipe on the gap that is allowed, and write a table right of it."""
    baseline = next(row for row in rows if row.recipe == BASELINE)
    several, allowed = _several(rows), _allowed(rows)
    _style(axes, f"Gap to bf16 after {baseline.held_out[-1][0]} steps, percent", "x")
    shown = [gap for row in rows for gap in row.seed_gaps]
    bound = 1.12 * (max(map(abs, (*shown, *allowed))) or 1.0)
    axes.axvline(0, color=color_of(BASELINE), linewidth=1, linestyle="--")
    for place, row in enumerate(rows):
        color = color_of(row.recipe)
        if allowed and row.tolerance_percent is not None:
            wide = bound + row.tolerance_percent
            axes.barh(place, wide, left=-bound, height=1.0, color=ALLOWED, alpha=TINT, linewidth=0)
        dot = {
            "color": color,
            "markersize": 5 if several else 6,
            "alpha": 0.6 if several else 1,
            "markeredgewidth": 0,
        }
        axes.plot(row.seed_gaps, [place] * len(row.seed_gaps), "o", **dot)
        if several and row is not baseline:
            axes.plot(row.gap_percent, place, "|", color=color, markersize=13, markeredgewidth=2.5)
        gap = "" if row is baseline else signed_percent(row.gap_percent)
        seeds = f"{len(row.seed_gaps)}" + (
            f" of {len(baseline.seeds)}" if row.seeds != baseline.seeds else ""
        )
        _beside(axes, place, gap, seeds if several else f"{row.held_out_loss:.3f}", color="0.15")
    _beside(axes, -0.9, "mean" if several else "gap", "seeds" if several else "loss", color="0.35")
    axes.set_yticks(range(len(rows)), [row.title for row in rows], size=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-bound, bound)
    told = "right of 0: worse than bf16"
    if several:
        told += f"; single seeds reach {max(shown):+.1f}%"
    elif len(rows) > 1:
        told += "; one seed cannot rank recipes"
    axes.set_xlabel(told, size=9)


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
    baseline = next(row for row in rows if row.recipe == BASELINE)
    _style(axes, f"{'Mean gap' if _several(rows) else 'Gap'} over the steps, percent; above 0 is worse")
    axes.set_xlabel("optimizer step", size=9)
    last_step = baseline.held_out[-1][0]
    allowed = list(_allowed(rows))
    # The last three quarters of each curve are inside.
    shown = [percent for row in rows for _, percent in row.gaps[len(row.gaps) // 4 :]]
    if allowed and max(map(abs, shown)) < allowed[0]:  # a small gap shall look small
        shown += [-allowed[0], allowed[0]]
    low, high = min(0.0, *shown), max(0.0, *shown)
    room = (LIMIT - 1) * ((high - low) or 3.0)  # equal losses have no gap
    low, high = low - room, high + room
    for percent in allowed:  # what every recipe is allowed is darker
        axes.axhspan(low, percent, color=ALLOWED, alpha=TINT, linewidth=0)
    axes.plot([0, last_step], [0, 0], color=color_of(BASELINE), alpha=0.5, linewidth=3)
    ends = []
    for row, dashes in zip(rows, _dashes(rows)):
        if row is not baseline:
            steps, percents = zip(*row.gaps)
            color = color_of(row.recipe)
            axes.plot(steps, percents, dashes, color=color, linewidth=1.6, marker="o", markersize=2.5)
            ends.append((percents[-1], row))
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
