"""``policy="auto"`` on 20 sizes: what it chose, and a step of the layer beside one of ``torch.nn.Linear`` in bf16.

Forward and backward with the host's time included, in turns. `share` is the time over that of ``torch.nn.Linear``, of
the layer that the policy left under the recipe or in high precision and of layers that are always one or the other.
All have the same weights. The policy times each size first, in a folder of its own, and then it is timed here: a choice
by chance would show.
With ``--only graphs`` all are replays of CUDA graphs and the policy is ``"auto-graphs"``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, captured, parser, report, runs_on_gpu
from torch import nn

import narrowcast as nc

SIZES = (  # rows, in, out
    (128, 256, 256), (256, 512, 512), (512, 1024, 1024), (1024, 1024, 1024), (2048, 1024, 1024),
    (4096, 1024, 1024), (8192, 1024, 1024), (1024, 2048, 2048), (2048, 2048, 2048), (4096, 2048, 2048),
    (8192, 2048, 1408), (1024, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 1024),
    (8192, 4096, 4096), (4096, 4096, 14336), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 8192, 8192),
)  # fmt: skip
RECIPES = {
    "delayed": nc.recipe.DelayedScaling(),
    "current": nc.recipe.Float8CurrentScaling(),
    "block": nc.recipe.Float8BlockScaling(),
}
SECONDS, WORST = 0.03, 1.02  # of a round; what a choice may cost


def layer_of(size: tuple[int, int, int], recipe: nc.recipe.Recipe | None, **options: Any) -> nn.Module:
    _, width, features = size
    layer = nc.Linear(width, features, bias=False, device="cuda", dtype=torch.bfloat16)
    if recipe is not None:
        nc.set_recipe(layer, recipe, **options)
    return layer


def step_on(layer: nn.Module, rows: int, width: int, features: int, replayed: bool) -> Callable[[], Any]:
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(grad)

    return captured(step) if replayed else step


def milliseconds(step: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def in_turns(steps: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median milliseconds of the first step, then of each other the share of that.

    Every round begins with another step: the first one after a pause finds a cooler GPU.
    """
    for step in steps:
        milliseconds(step, 4)
    count = max(3, min(100, int(SECONDS * 1e3 / milliseconds(steps[0], 3))))
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(-(-repeats // len(steps)) * len(steps)):
        for place in range(len(steps)):
            which = (turn + place) % len(steps)
            times[which].append(milliseconds(steps[which], count))
    first, *others = (statistics.median(column) for column in times)
    return [first, *(other / first for other in others)]


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    replayed = "graphs" in chosen.only
    policy = "auto-graphs" if replayed else "auto"
    os.environ["NARROWCAST_CACHE"] = tempfile.mkdtemp()
    for name, recipe in RECIPES.items():
        if not replayed and chosen.only not in name:
            continue
        for size in SIZES[: chosen.shapes]:
            auto = layer_of(size, recipe, policy=policy, rows=size[0])
            layers = [
                nn.Linear(size[1], size[2], bias=False, device="cuda", dtype=torch.bfloat16),
                auto,
                layer_of(size, None),
                layer_of(size, recipe),
            ]
            with torch.no_grad():  # numbers decide how much power a GEMM takes, and so how fast it runs
                for layer in layers[1:]:
                    layer.weight.copy_(layers[0].weight)  # type: ignore[operator, arg-type]
            ms, *shares = in_turns([step_on(layer, *size, replayed) for layer in layers], chosen.repeats)
            rows.append(
                {
                    "size": "{}x{}->{}".format(*size),
                    "recipe": name,
                    "policy": policy,
                    "chosen": "high precision" if auto.recipe is None else name,
                    "bf16_ms": round(ms, 4),
                    "share": round(shares[0], 3),
                    "share_in_high_precision": round(shares[1], 3),
                    "share_under_the_recipe": round(shares[2], 3),
                    "at_most_1.02": shares[0] <= WORST,
                }
            )
            print(rows[-1], flush=True)
            del auto, layers
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    chosen = parser(__doc__).parse_args()
    if runs_on_gpu(chosen):
        torch.manual_seed(0)
        report("policy", measure(chosen), chosen)


if __name__ == "__main__":
    main()
