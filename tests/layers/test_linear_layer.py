"""What all layers with linear layers inside share: delayed weight gradients, and what a node of the graph shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling

RECIPES: dict[str, Any] = {"none": None, "current": Float8CurrentScaling(), "delayed": DelayedScaling()}
LAYERS: dict[str, Any] = {
    "linear": lambda **options: nc.Linear(32, 48, device="cpu", **options),
    "split": lambda **options: nc.Linear(32, 48, device="cpu", parameters_split=("a", "b"), **options),
    "layernorm_linear": lambda **options: nc.LayerNormLinear(32, 48, device="cpu", **options),
    "layernorm_mlp": lambda **options: nc.LayerNormMLP(32, 48, device="cpu", **options),
    "grouped": lambda **options: nc.GroupedLinear(2, 32, 48, device="cpu", **options),
    "grouped_single": lambda **options: nc.GroupedLinear(
        2, 32, 48, device="cpu", single_grouped_parameter=True, **options
    ),
}


def run(layer: Any, x: Tensor, forward: Any = None) -> Tensor:
    given = ([3, 5],) if isinstance(layer, nc.GroupedLinear) else ()
    return (layer if forward is None else forward)(x, *given)


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if "weight" in name and "norm" not in name]


# -- backward_dw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_that_is_frozen_before_backward_dw(name: str, compiled: bool) -> None:
    """Its gradient is dropped, as autograd drops it, and is not what the next step gets; biases have theirs."""
    layer = LAYERS[name](recipe=RECIPES["current"], delay_wgrad_compute=True)
    twin = copy.deepcopy(layer)
    first, second = torch.randn(8, 32), torch.randn(8, 32)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for module, call in ((layer, forward), (twin, twin)):
        if module is layer:
            run(layer, first, call).square().sum().backward()
            for weight in weights_of(layer):
                weight.requires_grad_(False)
            layer.backward_dw()
            assert all(weight.grad is None for weight in weights_of(layer))
            assert all(p.grad is not None for n, p in layer.named_parameters() if "bias" in n)
            layer.backward_dw()  # nothing is left
            run(layer, first, call).square().sum().backward()
            layer.backward_dw()  # and a backward of a frozen weight leaves nothing
            for weight in weights_of(layer):
                weight.requires_grad_(True)
            layer.zero_grad()
        run(module, second, call).square().sum().backward()
        module.backward_dw()
        for store in module.wgrad_stores.values():
            store.assert_empty()
    for (label, ours), theirs in zip(layer.named_parameters(), twin.parameters()):
        assert torch.equal(ours.grad, theirs.grad), label
