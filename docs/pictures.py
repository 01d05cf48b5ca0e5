"""Draw pictures of the pages: the account of a step and two comparisons of recipes from recorded rows, and a watch of a
small model, which this script trains in seconds.

    python docs/pictures.py

The other pictures have a script each: ``performance.py``, ``scaling_tables.py``, ``grpo_chart.py``,
``attention_masks.py`` here, ``plot.py`` in ``benchmarks/``.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import narrowcast as nc
from narrowcast_tools.bench.account import Account, Row
from narrowcast_tools.bench.account_show import draw_account
from narrowcast_tools.train.comparison import TITLE
from narrowcast_tools.train.history import History, RunResult
from narrowcast_tools.train.pace import Pace
from narrowcast_tools.train.picture import TITLE as FIRST_TITLE
from narrowcast_tools.train.picture import draw
from narrowcast_tools.train.report import compare

DOCS = Path(__file__).resolve().parent
RESULTS, ASSETS = DOCS.parent / "benchmarks" / "results", DOCS / "assets"
H200 = (
    "Preset 125m: 85,347,072 parameters on bytes, 125M with a vocabulary of some 50,000 tokens. "
    "1500 steps of 8 sequences of 1024, the Python standard library's sources. "
    "NVIDIA H200, Linux x86_64, Python 3.12.3, torch 2.11.0+cu130, narrowcast 0.1.0"
)
FIRST = (
    "434,816 parameters, bytes of the Python standard library's sources. "
    "Intel(R) Xeon(R) Processor, 2 cores (torch uses 1), Linux x86_64, Python 3.11.7, torch 2.13.0+cpu, "
    "narrowcast 0.3.0.dev0"
)


def rows_of(file: str) -> list[dict[str, str]]:
    """Return the rows of a file of results."""
    with (RESULTS / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def account() -> bytes:
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
    caption = "narrowcast bench account --model 1b: {device}, torch {torch}, narrowcast {narrowcast}, {date}"
    return draw_account(accounts, caption.format(**where))


def comparison(file: str, trained: str, title: str, *, strict: bool) -> bytes:
    """Return the picture of a file of held-out losses, by recipe, seed and step."""
    curves: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in rows_of(file):
        curves[row["recipe"], int(row["seed"])].append((int(row["step"]), float(row["held-out loss"])))
    runs = [
        RunResult(recipe, History([], curve), curve[-1][0], 0, Pace(0.0), 0.0, seed)
        for (recipe, seed), curve in curves.items()
    ]
    return draw(compare(runs, strict=strict), subtitle=trained, title=title)


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
    nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
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


if __name__ == "__main__":
    watched().plot(ASSETS / "watch.png")
    (ASSETS / "account.png").write_bytes(account())
    first = comparison("first_light.csv", FIRST, FIRST_TITLE, strict=False)
    (ASSETS / "first-light.png").write_bytes(first)
    (ASSETS / "losses-h200.png").write_bytes(comparison("train_125m.csv", H200, TITLE, strict=True))
