"""The account of a step as a table, as CSV, and as bars beside bf16's."""

from __future__ import annotations

import csv
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from ..colors import color_of
from ..schemes import LETTERS, WIDTH, png, tell
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
    rows = 0.26 * len(groups) + 0.19 * len(groups) * len(accounts)
    figure = Figure(figsize=(WIDTH, 3.6 + 0.3 * len(panels) + rows), dpi=190, layout="constrained")
    shape = {"height_ratios": [len(names) for names in panels], "sharex": True, "squeeze": False}
    drawn = figure.subplots(len(panels), 1, **shape)[:, 0]
    for axes, names in zip(drawn, panels):
        _bars(axes, accounts, names)
    if changed:
        drawn[0].set_title("What the recipe changes, milliseconds", loc="left", size=LETTERS, weight="bold")
        told = f"Other changes: {', '.join(changed.values())}"
        drawn[-1].set_title(textwrap.fill(told, 44), loc="left", size=LETTERS, weight="bold")
    keys = [Patch(color=_color(one), label=_total(one)) for one in accounts]
    foot = (
        "Bars are milliseconds; shorter is better. Parts are rounded, so they may not add up to the step.\n"
        "bf16: 16 bits. Recipes: GEMMs in 8 or 4, with scales from earlier steps (delayed), of the tensor itself "
        "(current), or of blocks of 128 values. Attention is in bf16 everywhere."
    )
    tell(figure, _finding(accounts), f"{foot}\n{caption}", keys)
    return figure


def shown_ms(row: Row) -> float:
    """Return a group's time as tables show it; a picture adds these, so its sums are those of a table's cells."""
    return round(row.ms, 1)


def _bars(axes: Axes, accounts: Sequence[Account], groups: Sequence[str]) -> None:
    """Draw a bar per contender below the name of each group."""
    high = 0.19 / (0.26 + 0.19 * len(accounts))  # a group is 1 high, its name included
    for index, one in enumerate(accounts):
        times: dict[str, float] = defaultdict(float)
        for row in one.rows:
            times[DRAWN.get(row.group, row.group)] += shown_ms(row)
        fused = times[DRAWN["casts"]] and all(row.group != "activations" for row in one.rows)
        places = [place + 1 - (len(accounts) - index - 0.5) * high for place in range(len(groups))]
        lengths = [times[name] for name in groups]
        axes.barh(places, lengths, 0.9 * high, color=_color(one), label=one.contender)
        for name, place, length in zip(groups, places, lengths):
            told = ", activations are in the casts" if fused and name == DRAWN["activations"] else ""
            axes.text(length, place, f" {length:.1f}{told}" if length else " 0", va="center", size=LETTERS)
    for place, name in enumerate(groups):
        axes.text(0, place + 0.5 * (1 - len(accounts) * high), name, va="center", size=LETTERS)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.margins(x=0.14)
    axes.set_ylim(len(groups), 0)


def _finding(accounts: Sequence[Account]) -> str:
    """Return the title: the fastest step beside the first, and where most of the difference is."""
    first, fastest = accounts[0], min(accounts, key=lambda one: one.step_ms)
    if fastest is first:
        return "Where the time of a training step goes"
    times = {row.group: row.ms for row in fastest.rows}
    saved = {True: 0.0, False: 0.0}
    for row in first.rows:
        saved[row.group.startswith("GEMM")] += row.ms - times.get(row.group, 0.0)
    most = "matrix products" if saved[True] > saved[False] else "other kernels"
    bits, plain = (_bits(one.contender.partition(",")[0]) for one in (fastest, first))
    return (
        f"A training step takes {fastest.step_ms:.1f} ms in {bits}, {first.step_ms:.1f} ms in {plain}; "
        f"{most} save most"
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
