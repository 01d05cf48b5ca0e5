"""Layers behind a list of operations whose output is quantized: they compute what they do behind its decoded values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES: dict[str, Callable[[], Any]] = {
    "delayed": nc.recipe.DelayedScaling,
    "current": nc.recipe.Float8CurrentScaling,
    "block": nc.recipe.Float8BlockScaling,
    "mxfp8": nc.recipe.MXFP8BlockScaling,
}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": lambda: nc.LayerNorm(32),
    "rms_norm": lambda: nc.RMSNorm(32),
    "layernorm_linear": lambda: nc.LayerNormLinear(32, 48),
    "rmsnorm_mlp": lambda: nc.LayerNormMLP(32, 64, normalization="RMSNorm"),
    "linear": lambda: nc.Linear(32, 48),
    "ops_norm": lambda: nc.ops.Sequential(nc.ops.LayerNorm(32)),
    "ops_gelu": lambda: nc.ops.Sequential(nc.ops.GELU()),
    "ops_swiglu": lambda: nc.ops.Sequential(nc.ops.SwiGLU()),
    "ops_linear": lambda: nc.ops.Sequential(nc.ops.Linear(32, 48)),
    "softmax": lambda: nn.Softmax(-1),
}


class Decoded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.dequantize() if isinstance(x, nc.QuantizedTensor) else x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str, recipe: str, device: str) -> None:
    with torch.device(device):
        quantize, layer = nc.ops.Sequential(nc.ops.Quantize(forward=True, backward=False)), LAYERS[name]()
        x = torch.randn(32, 32)
    found = []
    for between in (nn.Identity(), Decoded()):
        model = nn.Sequential(copy.deepcopy(quantize), between, copy.deepcopy(layer))
        nc.set_recipe(model[0], RECIPES[recipe]())
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.float().square().sum().backward()
        found.append([y.detach(), leaf.grad, *[p.grad for p in model.parameters()]])
    assert all(grad is not None and grad.any() for grad in found[0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
