"""Draw pictures of the pages: the account of a step and two comparisons of recipes from recorded rows, and the watch of
a small model, which this script trains in seconds.

    python docs/pictures.py

The other pictures have a script each: ``performance.py``, ``scaling_tables.py``, ``grpo_chart.py``,
``attention_masks.py`` here, ``plot.py`` in ``benchmarks/``.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import narrowcast as nc
from narrowcast.inspect.picture import figure as watch_figure
from narrowcast_tools.bench.account import Account, Row
from narrowcast_tools.bench.account_show import account_figure
from narrowcast_tools.schemes import write_widths
from narrowcast_tools.train.history import History, RunResult
from narrowcast_tools.train.pace import Pace
from narrowcast_tools.train.picture import figure
from narrowcast_tools.train.report import compare

DOCS = Path(__file__).resolve().parent
RESULTS, ASSETS = DOCS.parent / "benchmarks" / "results", DOCS / "assets"
ACCOUNT = (
    "1B Llama of narrowcast's layers, compiled, 8192 tokens a step, CUDA graph; {device}, torch {torch}, "
    "narrowcast {narrowcast}, {date}"
)
WATCHED = nc.recipe.Float8CurrentScaling()
H200 = (
    "85,347,072 parameters, bytes of the Python standard library's sources, MXFP8 and NVFP4 emulated; NVIDIA H200, "
    "torch 2.11.0+cu130, narrowcast 0.1.0"
)
FIRST = "434,816 parameters, emulated on a CPU; bytes of the Python standard library's sources."


def rows_of(file: str) -> list[dict[str, str]]:
    """Return the rows of a file of results."""
    with (RESULTS / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def account(wide: bool) -> Figure:
    """Return the picture of ``account.csv``."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows_of("account.csv"):
        groups[row["contender"]].append(row)
    accounts = [
        Account(
            name,
            float(rows[0]["step_ms"]),
            rows[0]["captured"] == "True",
            tuple(
                Row(row["group"], float(row["ms"]), int(row["kernels"]), 0, float(row["floor_ms"]))
                for row in rows
            ),
        )
        for name, rows in groups.items()
    ]
    where = next(iter(groups.values()))[0]
    return account_figure(accounts, ACCOUNT.format(**where), wide=wide)


def comparison(file: str, trained: str, wide: bool) -> Figure:
    """Return the picture of a file of held-out losses, by recipe, seed and step."""
    curves: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in rows_of(file):
        curves[row["recipe"], int(row["seed"])].append((int(row["step"]), float(row["held-out loss"])))
    runs = [
        RunResult(recipe, History([], curve), curve[-1][0], 0, Pace(0.0), 0.0, seed)
        for (recipe, seed), curve in curves.items()
    ]
    return figure(compare(runs), subtitle=trained, wide=wide)


class Block(nn.Module):
    """A projection and a feed-forward block, each after a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nc.LayerNormLinear(width, width)
        self.up, self.down = nc.LayerNormLinear(width, 176), nc.Linear(176, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(x)
        return x + self.down(nn.functional.gelu(self.up(x)))


def watched(width: int = 64, steps: int = 200) -> nc.inspect.Watch:
    """Return the watch of a small model that learns a function, sampled every ten steps; half-way one bias breaks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(4)), nc.Linear(width, width))
    nc.set_recipe(model, WATCHED)
    watch = nc.watch(model, every=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.randn(width, width) / width**0.5
    for step in range(steps):
        if step == steps // 2:
            with torch.no_grad():
                model[2].up.bias[7] = 3e5  # an activation that outgrows all others, as large models have
        x = torch.randn(128, width)
        nn.functional.mse_loss(model(x), torch.tanh(x @ teacher)).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    return watch


def main() -> None:
    """Write each picture for light pages and for dark ones, and for phones."""
    records = watched().records
    recipes = [type(WATCHED).__name__]
    write_widths(lambda wide: watch_figure(records, recipes, wide=wide), ASSETS, "watch")
    write_widths(account, ASSETS, "account")
    write_widths(lambda wide: comparison("first_light.csv", FIRST, wide), ASSETS, "first-light")
    write_widths(lambda wide: comparison("train_125m.csv", H200, wide), ASSETS, "losses-h200")


if __name__ == "__main__":
    main()
