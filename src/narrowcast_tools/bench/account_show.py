"""The account of a step as a table, as CSV, and as bars beside bf16's."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from ..colors import color_of
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
    """Return a PNG image: the time of each group, a bar per contender.

    Args:
        accounts: bf16's first.
        caption: command and machine.
    """
    groups = [name for name in GROUPS if any(row.group == name for one in accounts for row in one.rows)]
    named = any("," in one.contender for one in accounts)  # the recipes' optimizer or head is another one
    height = 0.8 / len(accounts)
    rows = 0.16 * len(groups) * (len(accounts) + 1)
    figure = Figure(figsize=(8, 1.6 + rows), dpi=130, layout="constrained")
    figure.suptitle("Where the time of a training step goes", x=0.01, ha="left", weight="bold", size=14)
    axes = figure.subplots()
    for index, one in enumerate(accounts):
        times = {row.group: row.ms for row in one.rows}
        places = [place + (index - (len(accounts) - 1) / 2) * height for place in range(len(groups))]
        lengths = [times.get(name, 0.0) for name in groups]
        plain = ", PyTorch's AdamW, head in bf16" if one is accounts[0] and named else ""
        label = f"{one.contender}{plain}: {one.step_ms:.1f} ms"
        axes.barh(places, lengths, 0.9 * height, color=color_of(one.contender), label=label)
        for place, length in zip(places, lengths):
            axes.text(length, place, f" {length:.1f}" if length else " none", va="center", size=7.5)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.set_yticks(range(len(groups)), groups, size=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("ms of the step; none: fused into the casts, or no casts in bf16", size=9)
    axes.invert_yaxis()
    figure.supxlabel(caption, x=0.01, ha="left", size=8.5, color="0.35")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
