"""The account of a step as a table, as CSV, and as a waterfall beside bf16's."""

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


def waterfall(accounts: Sequence[Account], caption: str) -> bytes:
    """Return a PNG image: per recipe a panel where each group begins where the one above it ends, bf16's above it.

    Args:
        accounts: bf16's first.
        caption: command and machine.
    """
    first, *others = accounts
    figure = Figure(figsize=(8, 0.9 + 3.3 * max(len(others), 1)), dpi=130, layout="constrained")
    figure.suptitle("Where the time of a training step goes", x=0.01, ha="left", weight="bold", size=14)
    panels = figure.subplots(max(len(others), 1), 1, sharey=True, sharex=True, squeeze=False)[:, 0]
    for axes, other in zip(panels, others or [first]):
        pair = (first, other) if others else (first,)
        groups = [name for name in GROUPS if any(row.group == name for one in pair for row in one.rows)]
        for one, offset in zip(pair, (-0.2, 0.2)):
            start, label = 0.0, f"{one.contender}: {one.step_ms:.1f} ms"
            times = {row.group: row.ms for row in one.rows}
            color = color_of(one.contender)
            for place, name in enumerate(groups):
                ms = times.get(name, 0.0)
                axes.barh(
                    place + offset, ms, 0.36, left=start, color=color, label=label if place == 0 else None
                )
                start += ms
                if ms:
                    axes.text(start, place + offset, f" {ms:.1f}", va="center", size=7.5)
        axes.legend(loc="upper right", frameon=False, fontsize=9)
        axes.set_yticks(range(len(groups)), groups, size=9)
        axes.tick_params(axis="x", labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.08)
    panels[-1].set_xlabel("ms of the step, groups one after the other", size=9)
    figure.supxlabel(caption, x=0.01, ha="left", size=8.5, color="0.35")
    panels[0].invert_yaxis()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
