"""The host's time per layer in compiled stacks of small layers: slope between 4 and 20 layers, forward and backward.

The layers are so small that the GPU waits for the host, and the slope leaves out what a step costs once. ``root``: the
recipe was given by ``nc.set_recipe``, which renews delayed scaling once per step; else ``autocast`` is entered inside
the compiled function, and each layer renews its own. ``static``: with Inductor's static launcher for kernels of
libraries, ``options={"static_launch_user_defined_triton_kernels": True}``. ``whole operators``: with
``NARROWCAST_INLINE=0``.
"""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from bench_host import FEATURES, batch, feed_forward, host_us, ours
from harness import RECIPES, Row, parser, report_on_gpu, step_of
from peers import torchao
from torch import nn

import narrowcast as nc

DEPTHS = (4, 20)
STATIC = {"static_launch_user_defined_triton_kernels": True}


def stack(layer: Callable[[], nn.Module], depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(depth)))


def plain() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES, bias=False, device="cuda", dtype=torch.bfloat16)


def under(model: nn.Module, recipe: nc.recipe.Recipe) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=recipe):
            return model(x)

    return run


def contenders(chosen: Namespace) -> dict[str, tuple[Callable[[int], Callable[..., Any]], Any, bool]]:
    """Makers of a stack by depth, options of the compiler, whether operators are inlined."""
    makers: dict[str, tuple[Callable[[int], Callable[..., Any]], Any, bool]] = {
        "torch.nn.Linear": (lambda depth: stack(plain, depth), None, True)
    }
    for name in torchao.converted(stack(plain, 1)):
        makers[f"torchao {name}"] = (
            lambda depth, name=name: torchao.converted(stack(plain, depth))[name],
            None,
            True,
        )
    for name, recipe_of in RECIPES.items():
        recipe = recipe_of()
        kinds: dict[str, Callable[[], nn.Module]] = {"Linear": ours}
        if name == "current":  # compiling twenty of them takes a while
            kinds["LayerNormMLP"] = feed_forward
        for kind, layer in kinds.items():

            def root(depth: int, layer: Any = layer, recipe: Any = recipe) -> nn.Module:
                return nc.set_recipe(stack(layer, depth), recipe)

            def entered(depth: int, layer: Any = layer, recipe: Any = recipe) -> Callable[..., Any]:
                return under(stack(layer, depth), recipe)

            makers[f"{name}, {kind}, root"] = (root, None, True)
            makers[f"{name}, {kind}, root, static"] = (root, STATIC, True)
            makers[f"{name}, {kind}, autocast"] = (entered, None, True)
            makers[f"{name}, {kind}, root, whole operators"] = (root, None, False)
    return {name: made for name, made in makers.items() if chosen.only in name}


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, (make, options, inlined) in contenders(chosen).items():
        os.environ["NARROWCAST_INLINE"] = "1" if inlined else "0"
        medians = []
        for depth in DEPTHS:
            torch.compiler.reset()
            model = make(depth)
            run = torch.compile(model, fullgraph=True, options=options)
            x, dy = batch()
            step = step_of(model if isinstance(model, nn.Module) else nn.Identity(), run, x, dy, None)
            medians.append(statistics.median(host_us(step, chosen.repeats)))
        slope = (medians[1] - medians[0]) / (DEPTHS[1] - DEPTHS[0])
        rows.append(
            {
                "contender": name,
                "us per layer": round(slope, 1),
                "us of a step at depth 20": round(medians[1], 1),
            }
        )
        print(name, rows[-1], flush=True)
    return rows


def main() -> None:
    report_on_gpu("stack", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
