"""Operators in place behind a layer: they write to its output, as behind a layer of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import narrowcast as nc

RECIPES: dict[str, Any] = {"none": None, "current": nc.recipe.Float8CurrentScaling()}
CPU: Any = {"device": "cpu"}


class Grouped(nn.Module):
    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.experts = nc.GroupedLinear(2, 32, 32, recipe=recipe, **CPU)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, [3, x.shape[0] - 3])


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "linear": lambda r: nc.Linear(32, 32, recipe=r, **CPU),
    "layer_norm": lambda r: nc.LayerNorm(32, **CPU),
    "rms_norm": lambda r: nc.RMSNorm(32, **CPU),
    "layernorm_linear": lambda r: nc.LayerNormLinear(32, 32, recipe=r, **CPU),
    "layernorm_mlp": lambda r: nc.LayerNormMLP(32, 64, recipe=r, **CPU),
    "grouped": lambda r: Grouped(r),
    "ops": lambda r: nc.ops.Sequential(nc.ops.LayerNorm(32, **CPU), nc.ops.Linear(32, 32, **CPU)),
    "ops_linear": lambda r: nc.ops.Sequential(nc.ops.Linear(32, 32, **CPU)),
    "ops_gelu": lambda r: nc.ops.Sequential(nc.ops.GELU()),
    "ops_norm": lambda r: nc.ops.Sequential(nc.ops.RMSNorm(32, **CPU)),
}


def trained(module: nn.Module, x: Tensor, compiled: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    forward = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    y = forward(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]  # type: ignore[list-item]


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_relu_in_place(name: str, recipe: str, compiled: bool) -> None:
    layer = MODULES[name](RECIPES[recipe])
    if name.startswith("ops_") or name == "ops":
        nc.set_recipe(layer, RECIPES[recipe])
    for lead in ((16,), (2, 8)) if name != "grouped" else ((16,),):
        x = torch.randn(*lead, 32)
        ours = trained(nn.Sequential(layer, nn.ReLU(inplace=True)), x, compiled)
        for parameter in layer.parameters():
            parameter.grad = None
        theirs = trained(nn.Sequential(copy.deepcopy(layer), nn.ReLU()), x, False)
        assert all(map(torch.equal, ours, theirs))
        assert all(grad.any() for grad in ours[1:])
        for parameter in layer.parameters():
            parameter.grad = None


@pytest.mark.parametrize(
    "checkpoint", [torch.utils.checkpoint.checkpoint, nc.checkpoint], ids=["torch", "ours"]
)
@pytest.mark.parametrize("name", MODULES)
def test_behind_a_reentrant_checkpoint(name: str, checkpoint: Any) -> None:
    """Which runs the layer without gradients first, and hands its output on."""
    layer = MODULES[name](RECIPES["current"])
    x = torch.randn(7, 1, 32) if name != "grouped" else torch.randn(7, 32)
    results = []
    for relu in (nn.ReLU(inplace=True), nn.ReLU()):
        leaf, twin = x.clone().requires_grad_(), copy.deepcopy(layer)
        y = relu(checkpoint(twin, leaf, use_reentrant=True))
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *[p.grad for p in twin.parameters()]])
    assert all(map(torch.equal, *results))
    with torch.inference_mode():
        assert torch.equal(nn.Sequential(layer, nn.ReLU(inplace=True))(x), results[0][0])


def test_a_converted_head() -> None:
    """As VGG and AlexNet have it."""
    head: Any = nn.Sequential(
        *(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Dropout(0.0)),
        *(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 16)),
    )
    nc.convert(head, RECIPES["current"])
    x = torch.randn(16, 64)
    eager, compiled = (trained(copy.deepcopy(head), x, compile_it) for compile_it in (False, True))
    assert all(map(torch.equal, eager, compiled))
    assert all(grad.any() for grad in compiled[1:])


@pytest.mark.parametrize("name", ["identity", "quantize", "dropout", "reshape"])
def test_a_list_that_does_nothing(name: str) -> None:
    """It returns memory of its own: what is written behind it is not its input, which others may read."""
    ops = {
        "identity": nc.ops.Identity(),
        "quantize": nc.ops.Quantize(True, True, **CPU),
        "dropout": nc.ops.Dropout(0.0),
        "reshape": nc.ops.Reshape((8, -1)),
    }
    module = nc.ops.Sequential(ops[name])
    x = torch.randn(4, 8, requires_grad=True)
    before = x.detach().clone()
    y = module(x).relu_()
    y.sum().backward()
    assert torch.equal(x, before) and torch.equal(y.flatten(), before.relu().flatten())
    assert torch.equal(x.grad, (before > 0).float())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "recipe", [nc.recipe.Float8CurrentScaling, nc.recipe.Float8BlockScaling, nc.recipe.MXFP8BlockScaling]
)
def test_decoded_values(recipe: Any) -> None:
    x, rows = torch.randn(7, 32, requires_grad=True), nc.ops.Sequential(nc.ops.Quantize(**CPU))
    with nc.autocast(recipe=recipe()):
        codes = rows(x)
    values = codes.dequantize()
    before = values.detach().clone()
    values.relu_().sum().backward()
    assert torch.equal(values, before.relu()) and torch.equal(codes.dequantize(), before)
    assert torch.equal(x.grad, (before > 0).float())  # type: ignore[arg-type]
