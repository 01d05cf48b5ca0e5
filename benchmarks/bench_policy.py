"""``policy="auto"`` on 20 sizes: what it chose, and a step of the layer beside one of ``torch.nn.Linear`` in bf16.

Forward and backward with the host's time included, in turns. `share` is the time over that of ``torch.nn.Linear`` in
the same turn, the median of the turns: of the layer that the policy left under the recipe or in high precision, of
layers that are always one or the other, and of a second ``torch.nn.Linear``, which shows how far such times vary.
All have the same weights and inputs. The policy times each size first, in a folder of its own, and then it is timed
here: a choice by chance would show.
With ``--only graphs`` all are replays of CUDA graphs and the policy is ``"auto-graphs"``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from harness import RECIPES, Row, captured, parser, report_on_gpu, seconds_of
from torch import nn

import narrowcast as nc

SIZES = (  # rows, in, out
    (128, 256, 256), (256, 512, 512), (512, 1024, 1024), (1024, 1024, 1024), (2048, 1024, 1024),
    (4096, 1024, 1024), (8192, 1024, 1024), (1024, 2048, 2048), (2048, 2048, 2048), (4096, 2048, 2048),
    (8192, 2048, 1408), (1024, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 1024),
    (8192, 4096, 4096), (4096, 4096, 14336), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 8192, 8192),
)  # fmt: skip
SECONDS, TURNS = 0.01, 2  # of a layer in a turn; turns of each repeat
WORST = 1.02  # what a choice may cost


def layer_of(size: tuple[int, int, int], recipe: nc.recipe.Recipe | None, **options: Any) -> nn.Module:
    _, width, features = size
    layer = nc.Linear(width, features, bias=False, device="cuda", dtype=torch.bfloat16)
    if recipe is not None:
        nc.set_recipe(layer, recipe, **options)
    return layer


def step_on(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, replayed: bool) -> Callable[[], Any]:
    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(grad)
        nc.renew_delayed_scaling(layer)  # as an optimizer's step does

    return captured(step) if replayed else step


def in_turns(steps: list[Callable[[], Any]], turns: int) -> list[float]:
    """Median milliseconds of the first step, then of each other the median of its shares of that in the same turn.

    Every turn begins with another step: the first one after a pause finds a cooler GPU.
    """
    for step in steps:
        seconds_of(step, 4)
    count = max(3, min(100, int(SECONDS / seconds_of(steps[0], 3))))
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(-(-turns // len(steps)) * len(steps)):
        for place in range(len(steps)):
            which = (turn + place) % len(steps)
            times[which].append(seconds_of(steps[which], count) * 1e3)
    first, *others = times
    shares = (statistics.median(a / b for a, b in zip(other, first, strict=True)) for other in others)
    return [statistics.median(first), *shares]


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    replayed = "graphs" in chosen.only
    policy = "auto-graphs" if replayed else "auto"
    os.environ["NARROWCAST_CACHE"] = tempfile.mkdtemp()
    for name, make in RECIPES.items():
        recipe = make()
        if not replayed and chosen.only not in name:
            continue
        for size in SIZES[: chosen.shapes]:
            auto = layer_of(size, recipe, policy=policy, rows=size[0])
            place: Any = {"device": "cuda", "dtype": torch.bfloat16}
            peers = [nn.Linear(size[1], size[2], bias=False, **place) for _ in range(2)]
            layers = [*peers, auto, layer_of(size, None), layer_of(size, recipe)]
            x = torch.randn(size[0], size[1], **place).requires_grad_()
            grad = torch.randn(size[0], size[2], **place)
            with torch.no_grad():  # numbers decide how much power a GEMM takes, and so how fast it runs
                for layer in layers[1:]:
                    layer.weight.copy_(layers[0].weight)  # type: ignore[operator, arg-type]
            steps = [step_on(layer, x, grad, replayed) for layer in layers]
            ms, again, *shares = in_turns(steps, chosen.repeats * TURNS)
            rows.append(
                {
                    "size": "{}x{}->{}".format(*size),
                    "recipe": name,
                    "policy": policy,
                    "chosen": "high precision" if auto.recipe is None else name,
                    "bf16_ms": round(ms, 4),
                    "share_of_bf16_again": round(again, 3),
                    "share": round(shares[0], 3),
                    "share_in_high_precision": round(shares[1], 3),
                    "share_under_the_recipe": round(shares[2], 3),
                    "at_most_1.02": shares[0] <= WORST,
                }
            )
            print(rows[-1], flush=True)
            del auto, peers, layers, steps
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    report_on_gpu("policy", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
