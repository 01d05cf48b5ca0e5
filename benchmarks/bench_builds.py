"""Steps under delayed and current scaling on a GPU, beside those of another state of the package.

Each state has a process of its own, which waits while the other's runs: states take turns, and what else the machine
does meets both. Small layers show the host's time, blocks the GPU's.

    git archive cad8ec43 src | tar -x -C /tmp/old
    python benchmarks/bench_builds.py --old /tmp/old/src
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_transformer import BF16, LENGTH, ONE_B, OPTIMIZERS, WIDE, Model, angles, blocks, layer
from harness import Row, by_turns, parser, report, seconds_of
from torch import nn

import narrowcast as nc

NEW = Path(__file__).parents[1] / "src"
RECIPES = ("delayed", "current")
Step = Callable[[], Any]


def renew(model: nn.Module) -> None:
    """As a step of an optimizer does; states before 2026-11-28 renewed scales in forwards."""
    getattr(nc, "renew_delayed_scaling", lambda model: model)(model)


def small(make: Callable[..., nn.Module], recipe: str, compiled: bool) -> Step:
    model = nc.set_recipe(make(params_dtype=BF16, device="cuda"), recipe)
    run: Any = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(64, 256, dtype=BF16, device="cuda", requires_grad=True)

    def steps() -> None:
        for _ in range(50):
            x.grad = None
            model.zero_grad(set_to_none=True)
            run(x).sum().backward()

    steps()
    renew(model)
    return steps


def block(recipe: str) -> Step:
    (own,), positions = blocks(recipe, 1), angles(WIDE, LENGTH)
    run = torch.compile(own, fullgraph=True)
    x = torch.randn(4, LENGTH, WIDE[0], dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        own.zero_grad(set_to_none=True)
        run(x, rotary_pos_emb=positions).backward(dy)
        renew(own)

    return step


def four_blocks(recipe: str) -> Step:
    model, positions = Model(recipe), angles(WIDE, LENGTH)
    nc.set_recipe(model, {"blocks": recipe})
    optimizer, run = OPTIMIZERS["FusedAdam"](model), torch.compile(model, fullgraph=True)
    words = torch.randint(32000, (4, LENGTH + 1), device="cuda")

    def step() -> None:
        run(words[:, :-1].contiguous(), words[:, 1:].contiguous(), positions).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_b(recipe: str) -> Step:
    model = nc.set_recipe(nn.ModuleList(layer(ONE_B, at) for at in range(1, 17)), recipe)
    optimizer, positions = OPTIMIZERS["FusedAdam"](model), angles(ONE_B, LENGTH)
    runs = [torch.compile(one, fullgraph=True) for one in model]
    x = torch.randn(4, LENGTH, ONE_B[0], dtype=BF16, device="cuda")

    def step() -> None:
        y = x
        for run in runs:
            y = run(y, rotary_pos_emb=positions)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MLP = partial(nc.LayerNormMLP, 256, 512, activation="swiglu")
ROWS: dict[str, Callable[[], Step]] = {
    f"50 small {kind}, {recipe}": partial(small, make, recipe, "compiled" in kind)
    for recipe in RECIPES
    for kind, make in (
        ("Linear, eager", partial(nc.Linear, 256, 256)),
        ("LayerNormMLP, eager", MLP),
        ("LayerNormMLP, compiled", MLP),
    )
} | {
    "8B block, delayed": partial(block, "delayed"),
    "8B block, current": partial(block, "current"),
    "four 8B blocks, FusedAdam, delayed": partial(four_blocks, "delayed"),
    "16 blocks of 1B, FusedAdam, delayed": partial(one_b, "delayed"),
}


def work(repeats: int) -> None:
    """Be a state: for each line read, time the row of that name, and make it first if it is another."""
    name, step = "", None
    for line in sys.stdin:
        if line.strip() != name:
            name, step = line.strip(), None
            torch.compiler.reset()
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            step = ROWS[name]()
            for _ in range(6):
                step()
        print(seconds_of(step, repeats) * 1e3, flush=True)  # type: ignore[arg-type]


def timed(state: Any, row: str) -> float:
    """Milliseconds of a row in the process of a state."""
    print(row, file=state.stdin, flush=True)
    return float(state.stdout.readline())


def measure(chosen: argparse.Namespace) -> list[Row]:
    sources = {"old": chosen.old, "new": NEW} if chosen.old else {"new": NEW}
    states = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--work", "--repeats", str(chosen.repeats)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(source)},
            text=True,
        )
        for name, source in sources.items()
    }
    rows: list[Row] = []
    for row in [one for one in ROWS if chosen.only in one]:
        times = by_turns({name: partial(timed, state, row) for name, state in states.items()}, chosen.turns)
        found: Row = {"row": row, "turns": chosen.turns}
        for name, own in times.items():
            found[f"{name} ms"] = statistics.median(own)
        if chosen.old:
            found["times"] = statistics.median(a / b for a, b in zip(times["new"], times["old"]))
        print(found, flush=True)
        rows.append(found)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--old", type=Path, help="the src folder of the state beside which this one is")
    options.add_argument("--turns", type=int, default=9, help="times of each row and state (default 9)")
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.work:
        work(chosen.repeats)
    else:
        report("builds", measure(chosen), chosen)


if __name__ == "__main__":
    main()
