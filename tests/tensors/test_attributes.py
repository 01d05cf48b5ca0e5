"""Attributes of a quantized parameter, the unrounded initial value among them, are there after its module moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc

RECIPES: dict[str, Any] = {
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "nvfp4": nc.recipe.NVFP4BlockScaling(),
    "blocks": nc.recipe.Float8BlockScaling(),
}
MOVES: dict[str, Callable[[Any], Any]] = {
    "to_itself": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "copy": lambda m: m._apply(lambda x: x.to("cpu", copy=True)),
    "twice": lambda m: m.cpu().to("cpu"),
    "half": lambda m: m.half(),
    "to_bf16": lambda m: m.to(torch.bfloat16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
}


def made(name: str, kind: str) -> Any:
    with nc.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        return {
            "linear": lambda: nc.Linear(32, 64, device="cpu"),
            "mlp": lambda: nc.LayerNormMLP(32, 64, device="cpu"),
            "grouped": lambda: nc.GroupedLinear(2, 32, 64, device="cpu", single_grouped_parameter=True),
            "ops": lambda: nc.ops.Linear(32, 64, device="cpu"),
        }[kind]()


def weight_of(module: nn.Module) -> Any:
    return next(p for p in module.parameters() if isinstance(p, (nc.QuantizedTensor, nc.GroupedTensor)))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped", "ops"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_was_set_on_a_weight_stays(name: str, kind: str, move: str) -> None:
    module = made(name, kind)
    weight = weight_of(module)
    weight.main_grad, weight.note = torch.zeros(weight.shape), "mine"
    main_grad, kept = weight.main_grad, weight.get_high_precision_init_val()
    assert kept is not None
    codes = weight.detach().clone().dequantize()
    MOVES[move](module)
    after = weight_of(module)
    assert isinstance(after, nn.Parameter) and after.requires_grad
    assert after.main_grad is main_grad and after.note == "mine"
    if move != "to_empty":
        assert after.get_high_precision_init_val() is kept
        assert torch.equal(after.dequantize().float(), codes.to(after.dtype).float())


@pytest.mark.parametrize("name", RECIPES)
def test_a_master_begins_at_the_unrounded_value_after_a_move(name: str) -> None:
    module = made(name, "linear").cpu()
    kept = module.weight.get_high_precision_init_val()
    optimizer = nc.optimizers.FusedAdam(module.parameters(), master_weights=True)
    optimizer.initialize_state(module.weight)
    assert torch.equal(optimizer.get_unscaled_state(module.weight, "master_param"), kept.float())


def test_a_copy_is_no_parameter() -> None:
    weight = made("current", "linear").weight
    for other in (weight.detach(), weight.data, weight.to("cpu", copy=True)):
        assert not isinstance(other, nn.Parameter)
