"""The account of a step as a table, as CSV, and as bars beside bf16's."""

from __future__ import annotations

import csv
import textwrap
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from ..colors import color_of
from ..schemes import WIDTH, png, tell
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
    "GEMM, fprop": "GEMMs:\nmatrix products",
    "GEMM, dgrad": "GEMMs:\nmatrix products",
    "GEMM, wgrad": "GEMMs:\nmatrix products",
    "casts": "casts: quantizing",
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
    shown = Table(title=f"{title}: {account.contender}, {account.step_ms:.1f} ms {how}", title_justify="left")
    shown.add_column("group")
    for name in ("ms", "% of step", "kernels", "GB", "floor ms", "floor/time"):
        shown.add_column(name, justify="right")
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
            changed["head and loss"] = f"head in bf16 → {choice.removeprefix('head in ')}"
        else:
            changed["optimizer"] = f"PyTorch's AdamW → {choice}"
    panels = [[name for name in groups if name not in changed], [name for name in groups if name in changed]]
    panels = [names for names in panels if names]
    rows = 0.14 * len(groups) * (len(accounts) + 1)
    figure = Figure(figsize=(WIDTH, 2.6 + 0.4 * len(panels) + rows), dpi=165, layout="constrained")
    shape = {"height_ratios": [len(names) for names in panels], "sharex": True, "squeeze": False}
    drawn = figure.subplots(len(panels), 1, **shape)[:, 0]
    for axes, names in zip(drawn, panels):
        _bars(axes, accounts, names)
    if changed:
        drawn[0].set_title("What the recipe changes", loc="left", size=10)
        told = f"Other changes: {', '.join(changed.values())}"
        drawn[-1].set_title(textwrap.fill(told, 46), loc="left", size=10)
    drawn[-1].set_xlabel("milliseconds of the step; shorter is better", size=9)
    keys = [Patch(color=_color(one), label=_total(one, changed)) for one in accounts]
    foot = (
        "Under a recipe the GEMMs are in FP8, with scales from earlier steps (delayed), of the tensor itself "
        "(current), or of blocks of 128 values. Attention is in bf16 everywhere."
    )
    tell(figure, _finding(accounts), f"{foot}\n{caption}", keys)
    return figure


def _bars(axes: Axes, accounts: Sequence[Account], groups: Sequence[str]) -> None:
    height = 0.8 / len(accounts)
    for index, one in enumerate(accounts):
        times: dict[str, float] = defaultdict(float)
        for row in one.rows:
            times[DRAWN.get(row.group, row.group)] += row.ms
        fused = times["casts: quantizing"] and all(row.group != "activations" for row in one.rows)
        places = [place + (index - (len(accounts) - 1) / 2) * height for place in range(len(groups))]
        lengths = [times[name] for name in groups]
        axes.barh(places, lengths, 0.9 * height, color=_color(one), label=one.contender)
        for name, place, length in zip(groups, places, lengths):
            told = ", activations are in the casts" if fused and name == DRAWN["activations"] else ""
            axes.text(length, place, f" {length:.1f}{told}" if length else " 0", va="center", size=8.5)
    axes.set_yticks(range(len(groups)), groups, size=9)
    axes.tick_params(axis="x", labelbottom=True, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.01)
    axes.invert_yaxis()


def _finding(accounts: Sequence[Account]) -> str:
    """Return the title: the fastest step beside the first, and where most of the difference is."""
    first, fastest = accounts[0], min(accounts, key=lambda one: one.step_ms)
    if fastest is first:
        return "Where the time of a training step goes"
    times = {row.group: row.ms for row in fastest.rows}
    saved = {True: 0.0, False: 0.0}
    for row in first.rows:
        saved[row.group.startswith("GEMM")] += row.ms - times.get(row.group, 0.0)
    most = "GEMMs" if saved[True] > saved[False] else "other kernels"
    name, plain = (_named(one.contender.partition(",")[0]) for one in (fastest, first))
    others = [
        f"{_bits(choice.removeprefix('head in '))} head" if choice.startswith("head in ") else choice
        for choice in fastest.contender.split(", ")[1:]
    ]
    beside = f" with {' and '.join(others)}" if others else ""
    told = f"{fastest.step_ms:.1f} ms a step instead of {plain}'s {first.step_ms:.1f}; {most} save most"
    return f"{name[0].upper()}{name[1:]}{beside}: {told}"


def _bits(recipe: str) -> str:
    return recipe.upper() if recipe in ("mxfp8", "nvfp4") else "FP8"


def _color(one: Account) -> str:
    return color_of(one.contender.partition(",")[0])


def _named(recipe: str) -> str:
    return {"block": "128-block", "delayed": "delayed scaling", "current": "current scaling"}.get(
        recipe, recipe
    )


def _total(one: Account, changed: Collection[str]) -> str:
    """Return a contender's name and step, and what the step takes without groups that another choice changes."""
    name, rest = one.contender.partition(",")[0], sum(row.ms for row in one.rows if row.group not in changed)
    told = f"{_named(name)}: {one.step_ms:.1f} ms"
    return f"{told}; {rest:.1f} ms without {', '.join(changed)}" if changed else told
