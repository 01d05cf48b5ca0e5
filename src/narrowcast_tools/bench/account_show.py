"""The account of a step as a table, as CSV, and as bars beside bf16's."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from ..colors import color_of
from ..schemes import LETTERS, WIDTH, png, tell, wrap
from ..tables import make_table
from .account import GROUPS, Account, Ceilings, Row

COLUMNS = (
    "contender",
    "group",
    "ms",
    "kernels",
    "gigabytes",
    "floor_ms",
    "share_of_floor",
    "step_ms",
    "captured",
)


DRAWN = {
    "GEMM, fprop": "GEMMs (matrix products)",
    "GEMM, dgrad": "GEMMs (matrix products)",
    "GEMM, wgrad": "GEMMs (matrix products)",
    "casts": "casts (quantizing)",
    "norms": "norms, activations",
    "activations": "norms, activations",
    "other": "other, GPU idle",
    "gaps": "other, GPU idle",
}
"""The bar that a picture has for a group, if it is not one of its own."""
BAR, GAP = 0.165, 0.11  # inches: a contender's bar with its number, and the gap between groups
NAMES = 84  # points: the width of a group's name
SCALES = {
    "delayed": "from earlier steps (delayed)",
    "current": "of the tensor itself (current)",
    "rowwise": "of its rows (row-wise)",
    "block": "of blocks of 128 values (128-block)",
}


def share_of_floor(row: Row) -> float | None:
    """Return the floor over the time: 1 is as fast as the chip allows. None for gaps."""
    return row.floor_ms / row.ms if row.floor_ms and row.ms else None


def account_table(account: Account, title: str) -> Table:
    """Return a row per group of one contender's step."""
    how = "replayed as a CUDA graph" if account.captured else "as the host issues it; capturing failed"
    shown = make_table(
        ("group", "ms", "% of step", "kernels", "GB", "floor ms", "floor/time"),
        f"{title}: {account.contender}, {account.step_ms:.1f} ms {how}",
    )
    for row in account.rows:
        share = share_of_floor(row)
        shown.add_row(
            row.group,
            f"{row.ms:.2f}",
            f"{100 * row.ms / account.step_ms:.1f}",
            f"{row.kernels}" if row.kernels else "",
            f"{row.bytes / 1e9:.2f}" if row.bytes else "",
            f"{row.floor_ms:.2f}" if row.floor_ms else "",
            "" if share is None else f"{share:.2f}",
        )
    return shown


def write_account(
    accounts: Sequence[Account], ceilings: Ceilings, path: Path, machine: dict[str, str]
) -> None:
    """Write a row per contender and group, each with the ceilings and the machine."""
    rates = {f"{name}_per_second": f"{rate:.4g}" for name, rate in zip(Ceilings.__annotations__, ceilings)}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *rates, *machine])
        for account in accounts:
            for row in account.rows:
                share = share_of_floor(row)
                numbers = [f"{row.ms:.3f}", row.kernels, f"{row.bytes / 1e9:.3f}", f"{row.floor_ms:.3f}"]
                shared = ["" if share is None else f"{share:.3f}", f"{account.step_ms:.3f}", account.captured]
                writer.writerow(
                    [account.contender, row.group, *numbers, *shared, *rates.values(), *machine.values()]
                )


def draw_account(accounts: Sequence[Account], caption: str) -> bytes:
    """Return a PNG image of ``account_figure``."""
    return png(account_figure(accounts, caption))


def account_figure(accounts: Sequence[Account], caption: str) -> Figure:
    """Return the time of each group, a bar per contender. What another optimizer or head changes has its own panel.

    Args:
        accounts: bf16's first.
        caption: command and machine.
    """
    found = [name for name in GROUPS if any(row.group == name for one in accounts for row in one.rows)]
    groups = list(dict.fromkeys(DRAWN.get(name, name) for name in found))
    changed: dict[str, str] = {}
    for choice in accounts[-1].contender.split(", ")[1:]:
        if choice.startswith("head in "):
            changed["head and loss"] = f"head in bf16 → {_bits(choice.removeprefix('head in '))}"
        else:
            changed["optimizer"] = f"PyTorch's AdamW → {choice}"
    panels = [[name for name in groups if name not in changed], [name for name in groups if name in changed]]
    panels = [names for names in panels if names]
    rows = (BAR * len(accounts) + GAP) * len(groups)
    figure = Figure(figsize=(WIDTH, 0.3 + 0.4 * len(panels) + rows), dpi=190, layout="constrained")
    shape = {"height_ratios": [len(names) for names in panels], "sharex": True, "squeeze": False}
    drawn = figure.subplots(len(panels), 1, **shape)[:, 0]
    for axes, names in zip(drawn, panels):
        _bars(axes, accounts, names)
    if changed:
        drawn[0].set_title("What the recipe changes, ms", loc="left", size=LETTERS, weight="bold")
        told = f"Other changes: {', '.join(changed.values())}"
        title = wrap(told, 72 * WIDTH - NAMES, weight="bold")
        drawn[-1].set_title(title, loc="left", size=LETTERS, weight="bold")
    keys = [Patch(color=_color(one), label=_total(one)) for one in accounts]
    foot = (
        f"Shorter is better. {_terms(accounts)} Attention is in bf16 everywhere. Rounded parts may not add up to "
        "the step."
    )
    tell(figure, _finding(accounts), f"{foot}\n{caption}", keys)
    return figure


def shown_ms(row: Row) -> float:
    """Return a group's time as tables show it; a picture adds these, so its sums are those of a table's cells."""
    return round(row.ms, 1)


def _bars(axes: Axes, accounts: Sequence[Account], groups: Sequence[str]) -> None:
    """Draw a bar per contender beside the name of each group."""
    high = BAR / (GAP + BAR * len(accounts))  # of a group, which is 1 high
    for index, one in enumerate(accounts):
        times: dict[str, float] = defaultdict(float)
        for row in one.rows:
            times[DRAWN.get(row.group, row.group)] += shown_ms(row)
        fused = times[DRAWN["casts"]] and all(row.group != "activations" for row in one.rows)
        places = [place + (index - (len(accounts) - 1) / 2) * high for place in range(len(groups))]
        lengths = [times[name] for name in groups]
        axes.barh(places, lengths, 0.9 * high, color=_color(one), label=one.contender)
        for name, place, length in zip(groups, places, lengths):
            told = ", activations are in the casts" if fused and name == DRAWN["activations"] else ""
            axes.text(length, place, f" {length:.1f}{told}" if length else " 0", va="center", size=LETTERS)
    axes.set_xticks([])
    axes.set_yticks(range(len(groups)), [wrap(name, NAMES) for name in groups], size=LETTERS)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.margins(x=0.14)
    axes.set_ylim(len(groups) - 0.5, -0.5)


def _finding(accounts: Sequence[Account]) -> str:
    """Return the title: the fastest step beside the first."""
    first, fastest = accounts[0], min(accounts, key=lambda one: one.step_ms)
    if fastest is first:
        return "Where the time of a training step goes"
    recipe = _named(fastest.contender.partition(",")[0])
    return f"A step takes {fastest.step_ms:.1f} ms under {recipe}, {first.step_ms:.1f} in {first.contender}"


def _terms(accounts: Sequence[Account]) -> str:
    """Return what the recipes of the picture are, for readers who know none."""
    recipes = [one.contender.partition(",")[0] for one in accounts[1:]]
    bits = sorted({{"mxfp6": 6, "mxfp4": 4, "nvfp4": 4}.get(recipe, 8) for recipe in recipes}, reverse=True)
    scales = [SCALES[recipe] for recipe in recipes if recipe in SCALES]
    told = f", with scales {', '.join(scales)}" if scales else ""
    return (
        f"bf16: 16 bits. Recipes: GEMMs in {' or '.join(map(str, bits))}{told}."
        if recipes
        else "bf16: 16 bits."
    )


def _bits(recipe: str) -> str:
    """Return the format of a recipe, for readers who know no recipe."""
    return {"bf16": "bf16", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}.get(recipe, "FP8")


def _color(one: Account) -> str:
    return color_of(one.contender.partition(",")[0])


def _named(recipe: str) -> str:
    return {"block": "128-block", "delayed": "delayed scaling", "current": "current scaling"}.get(
        recipe, recipe
    )


def _total(one: Account) -> str:
    """Return a contender's name and step."""
    return f"{_named(one.contender.partition(',')[0])}: {one.step_ms:.1f} ms a step"
