"""The Mixtral-style example: its layer in one graph, and on a GPU a whole step without the host."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise

import narrowcast as nc
from narrowcast.testing import assert_close

PATH = Path(__file__).resolve().parents[2] / "examples" / "14_mixture_of_experts.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("mixture_of_experts", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layer_is_one_graph_for_every_routing(example: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = example.MoE(32, 64, 4, 2).to("cpu")
    nc.set_recipe(layer, nc.recipe.Float8CurrentScaling())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        results = []
        for run in (layer, compiled):
            y, balance = run(x)
            results.append(
                [y, balance, *torch.autograd.grad(y.square().sum() + balance, (x, layer.gate.weight))]
            )
        for ours, theirs in zip(*results, strict=True):
            assert_bitwise(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def trained(example: Any, recipe: nc.recipe.Recipe) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = example.Model().to(device="cuda", dtype=torch.bfloat16)
    nc.set_recipe(model, recipe)
    batch = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0)).cuda()
    return example.make_step(model, batch), batch


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", [nc.recipe.Float8CurrentScaling(), nc.recipe.Float8BlockScaling()], ids=repr
)
def test_a_step_needs_no_host(example: Any, recipe: nc.recipe.Recipe) -> None:
    step, batch = trained(example, recipe)
    losses = [step().item() for _ in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step, batch = trained(example, recipe)
    replay = example.captured(step)  # three steps
    again = [replay().item() for _ in range(3)]
    assert_close(torch.tensor(again), torch.tensor(losses[3:]), "training_loss")
    batch.copy_(batch.flip(0) ^ 1)  # another routing, the same graph
    assert replay().isfinite()
