"""The host's time for one small linear layer, forward and backward: microseconds per step that no kernel fills.

The layer is so small that the GPU waits for the host. Steps follow each other without synchronisation, as in a training
loop; contenders take turns. Captured steps and graphed callables replay a CUDA graph.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable

import torch
from harness import RECIPES, Row, Step, captured, parser, report_on_gpu, seconds_of, spread, step_of
from peers import torchao
from torch import Tensor

import narrowcast as nc

TOKENS, FEATURES = 128, 256
STEPS = 200


class UnderRecipe(torch.nn.Module):
    """A layer that enters its recipe itself, as what makes graphs needs it."""

    def __init__(self, layer: torch.nn.Module, recipe: nc.recipe.Recipe) -> None:
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x: Tensor) -> Tensor:
        with nc.autocast(recipe=self.recipe):
            return self.layer(x)


def ours() -> nc.Linear:
    return nc.Linear(FEATURES, FEATURES, bias=False, params_dtype=torch.bfloat16, device="cuda")


def feed_forward() -> nc.LayerNormMLP:
    return nc.LayerNormMLP(
        FEATURES,
        FEATURES,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=torch.bfloat16,
        device="cuda",
    )


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(), torch.randn_like(x)


def graphed_callable(recipe: nc.recipe.Recipe) -> Step:
    """The layer through ``torch.cuda.make_graphed_callables``: a graph for the forward and one for the backward."""
    module = UnderRecipe(ours(), recipe)
    run = torch.cuda.make_graphed_callables(module, (batch()[0],))
    return renewed(module, step_of(module, run, *batch(), None))


def renewed(layer: torch.nn.Module, step: Step) -> Step:
    """The step after scales were renewed once, as an optimizer does; before that each cast finds an amax itself."""
    step()
    nc.renew_delayed_scaling(layer)
    return step


def contenders(chosen: Namespace) -> dict[str, Callable[[], Step]]:
    """Makers of a step, by name."""
    plain = torch.nn.Linear(FEATURES, FEATURES, bias=False, device="cuda", dtype=torch.bfloat16)
    makers: dict[str, Callable[[], Step]] = {
        "torch.nn.Linear, eager": lambda: step_of(plain, plain, *batch(), None),
        "torch.nn.Linear, compiled": lambda: step_of(
            plain, torch.compile(plain, fullgraph=True), *batch(), None
        ),
    }
    for name, peer in torchao.converted(torch.nn.Sequential(plain)).items():
        makers[f"torchao {name}, compiled"] = lambda peer=peer: step_of(
            peer, torch.compile(peer, fullgraph=True), *batch(), None
        )

    def layer_step(recipe: nc.recipe.Recipe, mode: str | None, compiled: bool) -> Step:
        layer = ours()
        layer.recipe = recipe
        run = torch.compile(layer, fullgraph=True, mode=mode) if compiled else layer
        return renewed(layer, step_of(layer, run, *batch(), None))

    def feed_forward_step(recipe: nc.recipe.Recipe) -> Step:
        mlp = feed_forward()
        mlp.recipe = recipe
        return renewed(mlp, step_of(mlp, mlp, *batch(), None))

    for name, make in RECIPES.items():
        recipe = make()
        makers[f"{name}, eager"] = lambda recipe=recipe: layer_step(recipe, None, False)
        makers[f"{name}, LayerNormMLP, eager"] = lambda recipe=recipe: feed_forward_step(recipe)
        makers[f"{name}, compiled"] = lambda recipe=recipe: layer_step(recipe, None, True)
        makers[f"{name}, reduce-overhead"] = lambda recipe=recipe: layer_step(recipe, "reduce-overhead", True)
        makers[f"{name}, make_graphed_callables"] = lambda recipe=recipe: graphed_callable(recipe)
        makers[f"{name}, captured step"] = lambda recipe=recipe: captured(layer_step(recipe, None, False))
    return {
        name: make
        for name, make in makers.items()
        if chosen.only in name and not (chosen.skip_compile and ("compiled" in name or "overhead" in name))
    }


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, make in contenders(chosen).items():
        torch.compiler.reset()
        step = make()
        row: Row = {"contender": name}
        for one_thread in (False, True):
            with torch.autograd.set_multithreading_enabled(not one_thread):
                times = host_us(step, chosen.repeats)
            prefix = "one thread: " if one_thread else ""
            row |= {prefix + key: round(float(str(value)), 1) for key, value in spread(times, "us").items()}
        rows.append(row)
        print(name, statistics.median(times), flush=True)
    return rows


def host_us(step: Step, repeats: int) -> list[float]:
    for _ in range(20):
        step()
    return [seconds_of(step, STEPS) * 1e6 for _ in range(repeats)]


def main() -> None:
    report_on_gpu("host", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
