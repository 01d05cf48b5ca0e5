"""The picture of a comparison: each recipe's gap to bfloat16 at the last step, and at every evaluation."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from narrowcast._checks import counted

from ..colors import color_of
from ..schemes import LETTERS, WIDTH, png, tell, wrap
from .folder import COMPARED
from .report import BASELINE, Row, judged, too_few

LIMIT = 6 / 5  # of what the last step shows: the gaps of the first noisy evaluations may leave the panel
ALLOWED = {"color": "0.9", "linewidth": 0}
WIDER = "0.95"  # what some recipes are allowed besides
OWN = {"marker": "|", "color": "0.45", "markersize": 9, "markeredgewidth": 1.5, "linewidth": 1.5}
WIDE, HIGH = 6.4, 3.0  # inches of the panels side by side, below a title and above a foot: a slide's 4 to 3
FEW = 12  # evaluations: points on the curve of the batches, where a line would be a second curve
NAMES = 84  # points: the width of a recipe's name
TOP = -0.6  # where the rows begin; the first is at 0
LEARNED = 0.01  # of the first loss: a smaller change teaches nothing
PADDING = 0.04  # of the steps, on either side: the axes cut no marker
DASHES = ("-", "--", ":", "-.")  # distinguish one recipe's layer tables

CURVE = {"linewidth": 1.6, "marker": "o", "markersize": 2.5}
POINTS = {"linestyle": "none", "marker": "o", "markersize": 6}
RESUMED = {"color": "0.45", "linewidth": 1, "linestyle": ":"}
BATCHES = {"color": "0.75", "linewidth": 0.8}

ON_A_CPU = "Low precision emulated on a CPU, which rounds values as a GPU does. "


def caption(rows: Sequence[Row], *, parameters: int, text: str, timed: bool, file: str = COMPARED) -> str:
    """Return what was trained, in a line or two; the results beside the picture have the rest.

    Args:
        text: such as "bytes of my.txt".
        timed: False if a CPU trained, which emulates the formats of all rows but bf16's.
        file: of the results.
    """
    emulated = "" if timed or all(row.recipe == BASELINE for row in rows) else ON_A_CPU
    return f"{emulated}{parameters:,} parameters, {text}. {file} names the machine."


def draw(
    rows: Sequence[Row], *, subtitle: str, unit: str = "byte", train: Sequence[float] = (), resumed: int = 0
) -> bytes:
    """Return a PNG image of ``figure``, its panels side by side."""
    return png(figure(rows, subtitle=subtitle, unit=unit, train=train, resumed=resumed, wide=True))


def figure(
    rows: Sequence[Row],
    *,
    subtitle: str,
    unit: str = "byte",
    train: Sequence[float] = (),
    resumed: int = 0,
    wide: bool = False,
) -> Figure:
    """Draw a comparison: the finding, each recipe's last gap beside the allowed one, and the gaps over the steps.

    A run alone has its losses instead.

    Args:
        rows: the comparison; the baseline among them if there are several.
        subtitle: what was trained, where.
        unit: what a token is called.
        train: the loss of each step's batch, of a run alone.
        resumed: step at which a run alone was resumed; 0 if it was not.
        wide: for slides and screens, with the panels side by side; else for pages and phones.
    """
    if len(rows) == 1:
        drawn = Figure(figsize=(WIDTH, 2.6), dpi=285, layout="constrained")
        axes = drawn.subplots()
        if train:
            axes.plot(range(1, len(train) + 1), train, **BATCHES)
        _draw_losses(axes, rows[0], unit, _held_out(rows[0]) if train else CURVE)
        if resumed:
            axes.axvline(resumed, **RESUMED)
    else:
        lines = [wrap(row.title, NAMES).count("\n") + 1 for row in rows]
        last, steps = (0.17 * max(lines) + 0.13) * len(rows), max(2.3, 0.22 * sum(lines))
        layout = ConstrainedLayoutEngine(h_pad=0.08)  # keeps the words of the panels apart
        if wide:
            drawn = Figure(figsize=(WIDE, max(HIGH, last + 0.9)), dpi=240, layout=layout)
            ends, curves = drawn.subplots(1, 2)
        else:
            drawn = Figure(figsize=(WIDTH, last + steps + 2.0), dpi=285, layout=layout)
            ends, curves = drawn.subplots(2, 1, height_ratios=[last, steps])
        _draw_last_gaps(ends, rows)
        _draw_gaps(curves, rows)
    keys = _keys_of_run(rows[0], resumed) if train else _keys(rows)
    tell(drawn, finding(rows), f"{_terms(rows, unit)}\n{subtitle}", keys, columns=2 if train else 1)
    return drawn


def finding(rows: Sequence[Row]) -> str:
    """Return the title: whether the recipes' losses count as equal to bf16's."""
    above = [row.title for row in rows if not row.within]
    held_out = _baseline(rows).held_out
    first, last = held_out[0][1], held_out[-1][1]
    if len(rows) == 1:
        return f"{rows[0].title}: held-out loss {_moved(rows[0])}"
    if abs(last / first - 1) < LEARNED and len(held_out) > 1:
        return f"bf16 has not learned: its loss went from {first:.2f} to {last:.2f}"
    if few := too_few(step := rows[0].held_out[-1][0]):
        farthest = max(rows, key=lambda row: abs(row.gap_percent))
        most = abs(farthest.gap_percent)
        if most <= _least(rows):
            who = farthest.title if len(rows) == 2 else "All recipes"
            return f"{who} within {math.ceil(100 * most) / 100:.2f}% of bf16 after {counted(step, 'step')}"
        side = "above" if farthest.gap_percent > 0 else "below"
        return f"{farthest.title} is {most:.2f}% {side} bf16; {few} to judge"
    if not above:
        most = math.ceil(10 * max(row.gap_percent for row in rows)) / 10
        none = "On average, no" if _several(rows) else "No"
        return f"{none} recipe's final loss is more than {most:.1f}% above bf16's"
    return f"{'Mean loss' if _several(rows) else 'Loss'} not equal to bf16's: {', '.join(above)}"


def _moved(row: Row) -> str:
    """Return such as "fell from 5.58 to 2.99"."""
    (_, first), (_, last) = row.held_out[0], row.held_out[-1]
    if len(row.held_out) == 1:
        return f"is {last:.2f}"
    return f"{'fell' if last < first else 'rose'} from {first:.2f} to {last:.2f}"


def _baseline(rows: Sequence[Row]) -> Row:
    return next((row for row in rows if row.recipe == BASELINE), rows[0])


def _several(rows: Sequence[Row]) -> bool:
    return any(len(row.seeds) > 1 for row in rows)


def _allowed(rows: Sequence[Row]) -> dict[float, list[str]]:
    """Return the gaps that count as equal, or as chance of few steps, smallest first, and the recipes of each."""
    allowed: dict[float, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.tolerance_percent or 0.0):
        if row.tolerance_percent is not None:
            allowed.setdefault(row.tolerance_percent, []).append(row.title)
    return allowed


def _least(rows: Sequence[Row]) -> float:
    """Return the least gap that counts as equal, or as chance; what is smaller is no distance to zoom to."""
    return min(_allowed(rows)) or 1.0


def _counts_as(rows: Sequence[Row]) -> str:
    """Return what a small gap counts as: few steps leave it to chance."""
    return "equal" if judged(rows) else "chance"


def _band(rows: Sequence[Row], percent: float, low: float) -> tuple[float, float]:
    """Return where the gaps begin and end that count as equal, which a lower loss always does, or as chance."""
    return (low if judged(rows) else max(-percent, low)), percent


def _terms(rows: Sequence[Row], unit: str) -> str:
    baseline = _baseline(rows)
    if len(rows) == len(baseline.seeds) == 1:
        return "Held-out text is not trained on."
    told = [_rule(rows), f"On text not trained on, bf16's loss {_moved(baseline)} nats per {unit}"]
    if len(baseline.seeds) > 1:
        low, high = baseline.spread
        told.append(
            f"on average; its seeds end {high / baseline.held_out_loss - low / baseline.held_out_loss:.1%} apart"
        )
    return f"{' '.join(filter(None, told))}."


def _rule(rows: Sequence[Row]) -> str:
    """Return the gaps that count as equal, and which recipes do all the same."""
    if not (allowed := _allowed(rows)):
        return ""
    least, *wider = allowed
    told = f"This project counts a {'mean ' * _several(rows)}gap up to {least:g}% as {_counts_as(rows)}"
    told += "".join(f", for {' and '.join(allowed[percent])} {percent:g}%" for percent in wider)
    if few := too_few(rows[0].held_out[-1][0]):
        return f"{told}; {few} to judge a larger one."
    inside = [row.title for row in rows if row.within and row.gap_percent > (row.tolerance_percent or 0.0)]
    return told + (f"; {', '.join(inside)}: more, but no higher than bf16's highest seed." if inside else ".")


def _axis(rows: Sequence[Row]) -> tuple[float, float]:
    """Return where the axis of the last gaps begins and ends, in percent: the least limit is inside on either side."""
    gaps = [*_own_range(_baseline(rows)), *(gap for row in rows for gap in row.seed_gaps)]
    bound = 1.12 * max(*map(abs, gaps), _least(rows))
    return -bound, max(bound, 1.06 * max(_allowed(rows)))


def _own_range(baseline: Row) -> tuple[float, float]:
    """Return how far the lowest and the highest of the baseline's seeds end from their mean, in percent."""
    low, high = (100 * (loss / baseline.held_out_loss - 1) for loss in baseline.spread)
    return low, high


def _keys(rows: Sequence[Row]) -> list[Artist]:
    """Return the legend: what each mark is."""
    keys: list[Artist] = []
    if _several(rows):
        mark = {"color": "0.45", "linewidth": 0}
        low, high = _own_range(baseline := _baseline(rows))
        if high > low:
            seeds = f"{len(baseline.seeds)} seeds of bf16, lowest to highest: {high - low:.1f}%"
            keys.append(Line2D([], [], label=seeds, **OWN))
        one = "one seed, against bf16's of that seed"
        keys.append(Line2D([], [], marker="o", markersize=6, label=one, **mark))
        mean = "mean of a recipe's seeds"
        keys.append(Line2D([], [], marker="|", markersize=11, markeredgewidth=2.5, label=mean, **mark))
    if _allowed(rows):
        keys.append(
            Patch(label=f"{'mean ' * _several(rows)}gaps that count as {_counts_as(rows)}", **ALLOWED)
        )
    return keys


def _draw_last_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a line of dots per recipe on the gaps that are allowed, and write the gap right of it."""
    baseline = _baseline(rows)
    several, (low, high) = _several(rows), _axis(rows)
    _style(axes, f"Percent above bf16 at step {baseline.held_out[-1][0]}\n", "x")
    axes.axvline(0, color=color_of(BASELINE), linewidth=1, linestyle="--")
    for place, row in enumerate(rows):
        color = color_of(row.recipe)
        if row.tolerance_percent is not None:
            begin, end = _band(rows, row.tolerance_percent, low)
            axes.barh(place, end - begin, 0.75, left=begin, **ALLOWED)
        dot = {
            "color": color,
            "markersize": 6 if several else 7,
            "alpha": 0.6 if several else 1,
            "markeredgewidth": 0,
        }
        if several and row is baseline:
            axes.plot(_own_range(row), [place, place], **OWN)
        else:
            lanes = _lanes(row.seed_gaps, 0.045 * (high - low))
            axes.plot(row.seed_gaps, [place + lane for lane in lanes], "o", **dot)
        if several and row is not baseline:
            axes.plot(row.gap_percent, place, "|", color=color, markersize=13, markeredgewidth=2.5)
        gap = "" if row is baseline else signed_percent(row.gap_percent)
        seeds = f"{len(row.seed_gaps)}" + (
            f" of {len(baseline.seeds)}" if row.seeds != baseline.seeds else ""
        )
        _beside(axes, place, gap, *([seeds] if several else []), color="0.15")
    _beside(
        axes,
        TOP,
        *(("mean", "seeds") if several else ("gap",)),
        color="0.35",
        above=7,
    )
    axes.set_yticks(range(len(rows)), [wrap(row.title, NAMES) for row in rows], size=LETTERS)
    axes.set_ylim(len(rows) - 0.5, TOP)
    axes.set_xlim(low, high)
    told = "right of 0: worse than bf16"
    if judged(rows) and not several:  # the title of fewer steps says more
        told += "\none seed ranks no recipe"
    axes.set_xlabel(told, size=LETTERS)


def _lanes(gaps: Sequence[float], apart: float) -> list[float]:
    """Return how far below its row each dot is drawn, so that dots that coincide are seen apart."""
    last = {lane: -math.inf for lane in (0.0, 0.2, -0.2)}
    placed = [0.0] * len(gaps)
    for index in sorted(range(len(gaps)), key=gaps.__getitem__):
        free = [lane for lane, end in last.items() if gaps[index] - end >= apart]
        placed[index] = free[0] if free else min(last, key=last.__getitem__)
        last[placed[index]] = gaps[index]
    return placed


def _beside(axes: Axes, place: float, *told: str, color: str, above: float = 0) -> None:
    """Write a line of a table right of the panel."""
    for column, text in enumerate(told):
        where = {
            "xycoords": axes.get_yaxis_transform(),
            "textcoords": "offset points",
            "annotation_clip": False,
        }
        right = (50 + 42 * column, above)
        axes.annotate(
            text, (1, place), right, ha="right", va="center_baseline", size=LETTERS, color=color, **where
        )


def _keys_of_run(row: Row, resumed: int) -> list[Artist]:
    """Return the legend of a run alone."""
    held_out = Line2D([], [], color=color_of(row.recipe), label="held-out text", **_held_out(row))
    keys: list[Artist] = [held_out, Line2D([], [], **BATCHES, label="training batch")]
    if resumed:
        keys.append(Line2D([], [], **RESUMED, label=f"resumed at step {resumed}"))
    return keys


def _held_out(row: Row) -> dict[str, Any]:
    """Return the style of held-out losses beside those of batches."""
    return POINTS if len(row.held_out) <= FEW else CURVE


def _draw_losses(axes: Axes, row: Row, unit: str, style: dict[str, Any]) -> None:
    """Draw the held-out losses by step."""
    _style(axes, f"Loss in nats per {unit} by step")
    axes.set_xlabel("optimizer step", size=LETTERS)
    axes.plot(*zip(*row.held_out), color=color_of(row.recipe), **style)
    axes.locator_params(axis="x", nbins=5, integer=True)


def _draw_gaps(axes: Axes, rows: Sequence[Row]) -> None:
    baseline = _baseline(rows)
    _style(axes, f"{'Mean %' if _several(rows) else 'Percent'} above bf16 by step")
    axes.set_xlabel("optimizer step", size=LETTERS)
    last_step = baseline.held_out[-1][0]
    # The last three quarters of each curve are inside.
    shown = [percent for row in rows for _, percent in row.gaps[len(row.gaps) // 4 :]]
    least = _least(rows)
    low, high = min(0.0, *shown), max(0.0, *shown)
    room = (LIMIT - 1) * (high - low)
    low, high = low - room, high + room
    if high - low < 2 * least:
        low, high = min(low, -LIMIT * least), max(high, LIMIT * least)
    for number, percent in enumerate(_allowed(rows)):  # a wider one is lighter, and lies below
        style = ALLOWED | {"color": WIDER if number else ALLOWED["color"], "zorder": -number}
        axes.axhspan(*_band(rows, percent, low), **style)
    axes.axhline(0, color=color_of(BASELINE), linewidth=1, linestyle="--")
    ends = [(0.0, baseline)]
    for row, dashes in zip(rows, _dashes(rows)):
        if row is not baseline:
            steps, percents = zip(*row.gaps)
            axes.plot(steps, percents, dashes, color=color_of(row.recipe), **CURVE)
            ends.append((percents[-1], row))
    axes.set_ylim(low, high)
    axes.set_xlim(-PADDING * last_step, (1 + PADDING) * last_step)
    axes.locator_params(axis="x", nbins=3, integer=True)
    names = [wrap(row.title, NAMES) for _, row in ends]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    apart = min(0.11 * lines, 1 / max(1, len(ends))) * (high - low)
    heights = spread([min(max(end, low), high) for end, _ in ends], apart=apart)
    for name, height, (end, row) in zip(names, heights, ends):
        axes.annotate(
            name,
            xy=(last_step, min(max(end, low), high)),
            xytext=(last_step * (1 + 4 * PADDING), height),
            color=color_of(row.recipe),
            size=LETTERS,
            va="center",
            annotation_clip=False,
            # The line ends at the middle of the label's left edge; without a patch to clip it at, not near a neighbor.
            arrowprops={
                "arrowstyle": "-",
                "color": color_of(row.recipe),
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "patchA": None,
                "shrinkA": 3,
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
    axes.set_title(title, loc="left", size=LETTERS)
    axes.tick_params(labelsize=LETTERS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
