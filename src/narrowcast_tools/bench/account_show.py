"""The account of a step as a table, as CSV, and as bars beside bf16's."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from ..colors import PARTS
from ..schemes import LETTERS, WIDE, WIDTH, png, tell
from ..tables import make_table
from ..words import TITLES
from .account import Account, Ceilings, Row

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
    "GEMM, fprop": "matrix products",
    "GEMM, dgrad": "matrix products",
    "GEMM, wgrad": "matrix products",
    "casts": "quantizing",
    "norms": "norms, activations",
    "activations": "norms, activations",
    "head and loss": "head, loss",
    "other": "other, GPU idle",
    "gaps": "other, GPU idle",
}
"""The part of a bar that a picture has for a group, if it is not one of its own."""


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
    """Return a PNG image of ``account_figure`` for a screen."""
    return png(account_figure(accounts, caption, wide=True))


def account_figure(accounts: Sequence[Account], caption: str, *, wide: bool = False) -> Figure:
    """Return a bar per contender, as long as its step, whose parts are groups of kernels.

    Args:
        accounts: bf16's first.
        caption: command and machine.
        wide: for screens; else for phones.
    """
    figure = Figure(
        figsize=(WIDE if wide else WIDTH, 0.2 + 0.42 * len(accounts)), dpi=200, layout="constrained"
    )
    axes = figure.subplots()
    times = [_parts(one) for one in accounts]
    ends = [sum(parts.values()) for parts in times]
    digit = max(ends) * (0.02 if wide else 0.05)  # the milliseconds that a digit of a part's number is wide
    begins = [0.0] * len(accounts)
    found = [part for part in PARTS if any(parts[part] for parts in times)]
    for part in found:
        lengths = [parts[part] for parts in times]
        axes.barh(range(len(accounts)), lengths, 0.75, left=begins, color=PARTS[part])
        for place, (begin, length) in enumerate(zip(begins, lengths)):
            number = f"{length:.0f}"
            if length >= digit * len(number):
                inside = {"ha": "center", "va": "center_baseline", "size": LETTERS, "color": "white"}
                axes.text(begin + length / 2, place, number, **inside)
        begins = [begin + length for begin, length in zip(begins, lengths)]
    for place, (one, end) in enumerate(zip(accounts, ends)):
        axes.text(end, place, f" {one.step_ms:.1f} ms", va="center_baseline", size=LETTERS, weight="bold")
    axes.set_xticks([])
    axes.set_yticks(range(len(accounts)), [_named(one) for one in accounts], size=LETTERS, weight="bold")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.margins(x=0.14 if wide else 0.25)
    axes.set_ylim(len(accounts) - 0.5, -0.5)
    keys = [Patch(color=PARTS[part], label=part) for part in found]
    foot = f"Shorter is better; numbers are milliseconds, rounded. {_also(accounts)}{caption}"
    tell(figure, _finding(accounts), foot, keys, columns=4 if wide else 2)
    return figure


def shown_ms(row: Row) -> float:
    """Return a group's time as tables show it; a picture adds these, so its sums are those of a table's cells."""
    return round(row.ms, 1)


def _parts(account: Account) -> dict[str, float]:
    """Return the milliseconds of each part of a contender's bar."""
    times: dict[str, float] = defaultdict(float)
    for row in account.rows:
        times[DRAWN.get(row.group, row.group)] += shown_ms(row)
    return times


def _finding(accounts: Sequence[Account]) -> str:
    """Return the title: the fastest step beside the first."""
    first, fastest = accounts[0], min(accounts, key=lambda one: one.step_ms)
    if fastest is first:
        return "Where the time of a training step goes"
    steps = [f"{one.step_ms:.1f} ms in {_named(one)}" for one in (fastest, first)]
    return f"A training step takes {', '.join(steps)}"


def _also(accounts: Sequence[Account]) -> str:
    """Return what the recipes' steps have besides the recipe, and which kernels do two things."""
    told = ""
    if also := accounts[-1].contender.split(", ")[1:]:
        told = f"The recipes also have {' and '.join(_choice(one) for one in also)}. "
    fused = [one for one in accounts if all(row.group != "activations" for row in one.rows)]
    if any(row.group == "casts" for one in fused for row in one.rows):
        told += "Quantizing includes fused activations. "
    return told


def _choice(choice: str) -> str:
    """Return such as "a head in FP8" for "head in current"."""
    head = choice.removeprefix("head in ")
    return choice if head == choice else f"a head in {TITLES.get(head, head)}"


def _named(one: Account) -> str:
    recipe = one.contender.partition(",")[0]
    return TITLES.get(recipe, recipe)
