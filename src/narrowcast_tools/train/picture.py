"""The picture of runs: losses and gaps to bfloat16's over the steps, and each recipe's gap at the end."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from narrowcast._checks import counted

from ..colors import color_of
from ..schemes import LETTERS, WIDE, WIDTH, middles, png, tell, wrap
from .report import BASELINE, Row, baseline_of, percent_above, why_unjudged

HIGH = 4.2  # inches: the panels side by side, without title and foot
NAMES = 104  # points: the width of a recipe's name
STEEP = 0.2  # of the steps: losses fall so far in them that later ones look alike
LEARNED = 0.01  # of the first loss: a smaller change teaches nothing
SMALLEST = 0.25  # percent: a scale of gaps that ends closer to 0 makes rounding look large
DASHES = ("-", "--", ":", "-.")  # distinguish one recipe's layer tables

SEEDS = {"color": "0.88", "linewidth": 0}
# bf16: other curves are seen on it
BENEATH: dict[str, Any] = {
    "color": color_of("bf16"),
    "alpha": 0.45,
    "linewidth": 5,
    "solid_capstyle": "butt",
}
CURVE: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": 3}
BATCHES: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.5}
RESUMED = {"color": "0.35", "linewidth": 1, "linestyle": ":"}


def caption(rows: Sequence[Row], *, parameters: int, text: str, timed: bool) -> str:
    """Return what was trained; the results beside the picture have the rest.

    Args:
        text: such as "bytes of my.txt".
        timed: False if a CPU trained, which emulates the formats of all rows but bf16's.
    """
    emulated = "" if timed or all(row.recipe == BASELINE for row in rows) else ", emulated on a CPU"
    return f"{parameters:,} parameters{emulated}; {text}"


def draw(
    rows: Sequence[Row], *, subtitle: str, unit: str = "byte", train: Sequence[float] = (), resumed: int = 0
) -> bytes:
    """Return a PNG image of ``figure`` for a screen."""
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
    """Draw the losses over the steps, and unless a run is alone the gaps to bf16's over the steps and at the end.

    Args:
        rows: the comparison; the baseline among them if there are several.
        subtitle: what was trained, where.
        unit: what a token is called.
        train: the loss of each step's batch, of a run alone.
        resumed: step at which a run alone was resumed; 0 if it was not.
        wide: for screens, with the panels side by side; else for phones.
    """
    layout = ConstrainedLayoutEngine(h_pad=0.08, wspace=0.06)
    if len(rows) == 1:
        drawn = Figure(figsize=(WIDE if wide else WIDTH, HIGH), dpi=200, layout=layout)
        _draw_losses(drawn.subplots(), rows, unit, train, resumed)
        foot = f"Held-out text is not trained on. {subtitle}"
        tell(drawn, finding(rows), foot, _keys(rows, train, resumed), columns=3 if wide else 1)
        return drawn
    ends = max(HIGH if wide else 2.2, 0.19 * sum(_heights(_recipes(rows), rows)) + 0.7)
    if wide:
        drawn = Figure(figsize=(WIDE, ends), dpi=200, layout=layout)
        panels = drawn.subplot_mosaic([["losses", "ends"], ["gaps", "ends"]], height_ratios=[1, 3])
    else:
        drawn = Figure(figsize=(WIDTH, 4.4 + ends), dpi=285, layout=layout)
        panels = drawn.subplot_mosaic([["losses"], ["gaps"], ["ends"]], height_ratios=[1.5, 2.9, ends])
    begin = _first_drawn(rows)
    _draw_losses(panels["losses"], rows, unit, begin=begin)
    panels["losses"].set_xlabel("")
    panels["losses"].locator_params(axis="y", nbins=3)
    scale = _scale(rows, begin)
    _draw_gaps(panels["gaps"], rows, begin)
    panels["gaps"].set_ylim(scale)
    _draw_ends(panels["ends"], rows, scale)
    seeds = why_unjudged(rows) or "A gap compares runs of one seed; curves are means over seeds."
    steep = f"\nCurves leave out the steep part before step {begin}." * (begin > 0)
    tell(drawn, finding(rows), f"{seeds}{steep}\n{subtitle}", _keys(rows), columns=4 if wide else 2)
    return drawn


def finding(rows: Sequence[Row]) -> str:
    """Return the title: which recipes are above the range of bf16's seeds; without a range, how large the gaps are."""
    baseline, recipes = baseline_of(rows), _recipes(rows)
    (_, first), (step, last) = baseline.held_out[0], baseline.held_out[-1]
    if len(rows) == 1:
        return f"{rows[0].title}: held-out loss {_moved(rows[0])}"
    if abs(last / first - 1) < LEARNED and len(baseline.held_out) > 1:
        return f"bf16 has not learned: its loss went from {first:.2f} to {last:.2f}"
    if why_unjudged(rows):
        gaps = [signed_percent(row.gap_percent) for row in sorted(recipes, key=lambda row: row.gap_percent)]
        whose = f"{recipes[0].title}'s loss differs" if len(recipes) == 1 else "losses differ"
        ends = " to ".join(dict.fromkeys((gaps[0], gaps[-1])))
        return f"After {counted(step, 'step')}, {whose} from bf16's by {ends}"
    above = [row for row in recipes if row.place == "above"]
    others = [row for row in recipes if row.place != "above"]
    where = " or ".join(sorted({row.place for row in others}, reverse=True))
    seeds = f"the range of bf16's {len(baseline.seeds)} seeds"
    if not above:
        whose = recipes[0].title if len(recipes) == 1 else "every recipe"
        return f"The loss of {whose} is {where} {seeds}"
    told = f"Above {seeds}: {', '.join(f'{row.title} ({signed_percent(row.gap_percent)})' for row in above)}"
    if len(others) > 2:
        return f"{told}; {where}: the other {len(others)}"
    return f"{told}; {where}: {' and '.join(row.title for row in others)}" if others else told


def _moved(row: Row) -> str:
    """Return such as "fell from 5.58 to 2.99", with the lowest loss if it is not the last."""
    (_, first), (_, last) = row.held_out[0], row.held_out[-1]
    if len(row.held_out) == 1:
        return f"is {last:.2f}"
    step, lowest = min(row.held_out, key=lambda point: point[1])
    if f"{lowest:.2f}" not in (f"{first:.2f}", f"{last:.2f}"):
        return f"fell from {first:.2f} to {lowest:.2f} at step {step}, {last:.2f} at the end"
    return f"{'fell' if last < first else 'rose'} from {first:.2f} to {last:.2f}"


def _recipes(rows: Sequence[Row]) -> list[Row]:
    """Return all rows but the baseline's."""
    return [row for row in rows if row is not baseline_of(rows)]


def _several(rows: Sequence[Row]) -> bool:
    return any(len(row.seeds) > 1 for row in rows)


def _band(baseline: Row, begin: int) -> list[tuple[int, float, float]]:
    """Return how far the lowest and the highest of bf16's seeds are from their mean, in percent, by step."""
    if baseline.seed_range is None:
        return []
    return [
        (step, percent_above(low, mean), percent_above(high, mean))
        for (step, mean), (low, high) in zip(baseline.held_out, baseline.losses)
        if step >= begin
    ]


def _scale(rows: Sequence[Row], begin: int) -> tuple[float, float]:
    """Return the ends of the one scale of gaps that a picture has, in percent."""
    gaps = [-SMALLEST, SMALLEST, *(gap for row in rows for gap in row.seed_gaps)]
    gaps += [gap for row in rows for step, gap in row.gaps if step >= begin]
    gaps += [gap for _, *ends in _band(baseline_of(rows), begin) for gap in ends]
    margin = 0.06 * (max(gaps) - min(gaps))
    return min(gaps) - margin, max(gaps) + margin


def _name(row: Row, rows: Sequence[Row]) -> str:
    """Return what a row is called, with its gap, and with its seeds if any has several."""
    seeds = [counted(len(row.seed_gaps), "seed")] if _several(rows) else []
    return "\n".join((wrap(row.title, NAMES, weight="bold"), *seeds, signed_percent(row.gap_percent)))


def _heights(recipes: Sequence[Row], rows: Sequence[Row]) -> list[float]:
    """Return how many lines of text each recipe takes."""
    return [_name(row, rows).count("\n") + 1.6 for row in recipes]


def _keys(rows: Sequence[Row], train: Sequence[float] = (), resumed: int = 0) -> list[Artist]:
    """Return the legend: what each mark is."""
    if len(rows) == 1:
        color = color_of(rows[0].recipe)
        keys: list[Artist] = [Line2D([], [], color=color, label="held-out text", **CURVE)] if train else []
        keys += [Line2D([], [], color=color, **BATCHES, label="training batch")] if train else []
        return keys + ([Line2D([], [], **RESUMED, label=f"resumed at step {resumed}")] if resumed else [])
    keys = [
        Line2D([], [], label=wrap(row.title, NAMES), **_line(row, rows, dashes))
        for row, dashes in zip(rows, _dashes(rows))
    ]
    if baseline_of(rows).seed_range:
        keys.append(Patch(label=wrap(f"bf16's {len(baseline_of(rows).seeds)} seeds", NAMES), **SEEDS))
    if _several(rows):
        mark = {"color": "0.35", "linewidth": 0}
        keys.append(Line2D([], [], marker="o", markersize=6, alpha=0.6, label="a seed", **mark))
        keys.append(Line2D([], [], marker="|", markersize=11, markeredgewidth=2.5, label="mean", **mark))
    return keys


def _first_drawn(rows: Sequence[Row]) -> int:
    """Return the first evaluation after the steep part of the losses; 0 if fewer than two follow."""
    steps = [step for step, _ in baseline_of(rows).held_out]
    later = [step for step in steps if step >= STEEP * steps[-1]]
    return later[0] if len(later) > 1 else 0


def _line(row: Row, rows: Sequence[Row], dashes: str) -> dict[str, Any]:
    """Return how a row's curves look."""
    return (
        BENEATH if row is baseline_of(rows) else {"color": color_of(row.recipe), "linestyle": dashes, **CURVE}
    )


def _draw_losses(
    axes: Axes,
    rows: Sequence[Row],
    unit: str,
    train: Sequence[float] = (),
    resumed: int = 0,
    begin: int = 0,
) -> None:
    """Draw the held-out losses by step, of several rows on that of bf16."""
    _style(axes, f"{'Loss' if train else 'Held-out loss'}, nats per {unit}", "optimizer step")
    axes.locator_params(axis="x", nbins=5, integer=True)
    if len(rows) == 1:
        color = color_of(rows[0].recipe)
        if train:
            axes.plot(range(1, len(train) + 1), train, color=color, **BATCHES)
        axes.plot(*zip(*rows[0].held_out), color=color, **CURVE)
        if resumed:
            axes.axvline(resumed, **RESUMED)
        return
    _draw_curves(axes, rows, [row.held_out for row in rows], begin)


def _draw_gaps(axes: Axes, rows: Sequence[Row], begin: int) -> None:
    """Draw how far each recipe's loss is above bf16's by step: curves that coincide as losses are seen apart."""
    _style(axes, "Gap to bf16 (above: worse)", "optimizer step")
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter("{x:g}%")
    if band := _band(baseline_of(rows), begin):
        steps, low, high = map(list, zip(*band))
        axes.fill_between(steps, low, high, **SEEDS)
    _draw_curves(axes, rows, [row.gaps for row in rows], begin)


def _draw_curves(
    axes: Axes, rows: Sequence[Row], curves: Sequence[Sequence[tuple[int, float]]], begin: int
) -> None:
    for row, dashes, curve in zip(rows, _dashes(rows), curves):
        order = 1.9 if row is baseline_of(rows) else 2
        drawn = [point for point in curve if point[0] >= begin]
        axes.plot(*zip(*drawn), **_line(row, rows, dashes), zorder=order)


def _draw_ends(axes: Axes, rows: Sequence[Row], scale: tuple[float, float]) -> None:
    """Draw a line of dots per recipe on the range of bf16's seeds, with the name and the gap at its left."""
    recipes, several = _recipes(rows), _several(rows)
    sides = "\N{LEFTWARDS ARROW} better      worse \N{RIGHTWARDS ARROW}"
    _style(axes, "Gap at the end", sides, "x")
    if own := baseline_of(rows).seed_range:
        axes.axvspan(*own, **SEEDS)
    axes.axvline(0, **BENEATH)
    heights = _heights(recipes, rows)
    places = middles(heights)
    for place, row in zip(places, recipes):
        color = color_of(row.recipe)
        lanes = _lanes(row.seed_gaps, 0.045 * (scale[1] - scale[0]))
        dots = {"color": color, "markersize": 6 if several else 8, "alpha": 0.6 if several else 1}
        axes.plot(row.seed_gaps, [place + lane for lane in lanes], "o", markeredgewidth=0, **dots)
        if several:
            axes.plot(row.gap_percent, place, "|", color=color, markersize=14, markeredgewidth=3)
    axes.set_yticks(places, [_name(row, rows) for row in recipes], size=LETTERS, weight="bold")
    axes.tick_params(axis="y", length=10, width=6)  # a swatch beside each name
    for row, tick in zip(recipes, axes.yaxis.get_major_ticks()):
        tick.tick1line.set_markeredgecolor(color_of(row.recipe))
    axes.set_ylim(sum(heights), 0)
    axes.set_xlim(scale)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:g}%")


def _lanes(gaps: Sequence[float], apart: float) -> list[float]:
    """Return how far below its row each dot is drawn, so that dots that coincide are seen apart."""
    last = {lane: -math.inf for lane in (0.0, 0.5, -0.5)}
    placed = [0.0] * len(gaps)
    for index in sorted(range(len(gaps)), key=gaps.__getitem__):
        free = [lane for lane, end in last.items() if gaps[index] - end >= apart]
        placed[index] = free[0] if free else min(last, key=last.__getitem__)
        last[placed[index]] = gaps[index]
    return placed


def _dashes(rows: Sequence[Row]) -> list[str]:
    seen: Counter[str] = Counter()
    dashes = []
    for row in rows:
        dashes.append(DASHES[seen[row.recipe] % len(DASHES)])
        seen[row.recipe] += 1
    return dashes


def signed_percent(percent: float) -> str:
    """Return a label such as `+0.31%`, with a real minus sign, and `0.00%` without a sign."""
    told = f"{percent:+.2f}%".replace("-", "\N{MINUS SIGN}")
    return told[1:] if told[1:] == "0.00%" else told


def _style(axes: Axes, title: str, below: str, grid: Literal["x", "y"] = "y") -> None:
    axes.set_title(title, loc="left", size=LETTERS, weight="bold")
    axes.set_xlabel(below, size=LETTERS)
    axes.tick_params(labelsize=LETTERS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.85", linewidth=0.8)
    axes.set_axisbelow(True)
