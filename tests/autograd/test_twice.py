"""Second derivatives: exact where the layer is PyTorch's, else refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc

LAYERS = {
    "Linear": lambda: nc.Linear(24, 24, recipe="current"),
    "LayerNormMLP": lambda: nc.LayerNormMLP(24, 40, recipe="current"),
    "RMSNorm": lambda: nc.RMSNorm(24),
    "Sequential": lambda: nc.ops.Sequential(nc.ops.Linear(24, 24), nc.ops.GELU()),
}


def penalty(layer: Any, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    return grad.pow(2).sum()


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_derivative_says_what_to_use(name: str) -> None:
    x = torch.randn(7, 24, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"a second derivative; use .*autocast\(enabled=False\), which is exact$"
    ):
        penalty(LAYERS[name](), x).backward()
    with pytest.raises(RuntimeError, match="a second derivative"):  # it runs what leads to x alone
        torch.autograd.grad(penalty(LAYERS[name](), x), x)


def test_a_linear_layer_in_high_precision_is_differentiated_twice() -> None:
    x = torch.randn(7, 24, requires_grad=True)
    layer = LAYERS["Linear"]()
    with nc.autocast(enabled=False):
        penalty(layer, x).backward()
    plain = torch.nn.Linear(24, 24)
    plain.load_state_dict(layer.state_dict(), strict=False)
    again = x.detach().clone().requires_grad_()
    penalty(plain, again).backward()
    assert torch.equal(x.grad, again.grad)
