"""The boundary of a linear layer: tensors as tensors, a plan as data, and nothing that reaches the module."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from recipes import DEVICE
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import DelayedScales, LinearFunction, LinearFwdArgs, LinearWgrad
from narrowcast.recipe import linear_plan

CURRENT = nc.recipe.Float8CurrentScaling()
DTYPE = torch.bfloat16


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """(weight, input, bias)."""
    return (
        torch.randn(48, 32, device=DEVICE, dtype=DTYPE, requires_grad=True),
        torch.randn(2, 8, 32, device=DEVICE, dtype=DTYPE, requires_grad=True),
        torch.randn(48, device=DEVICE, dtype=DTYPE, requires_grad=True),
    )


def arguments(
    recipe: Any, needs_input: bool = True, needs_weight: bool = True, **changes: Any
) -> LinearFwdArgs:
    plan = linear_plan(recipe, "", needs_input, needs_weight, module_type="linear")
    args = LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), True)
    return args._replace(**changes)


def test_a_plan_is_resolved_once_and_frozen() -> None:
    plan = linear_plan(CURRENT, "", True, True, module_type="linear")
    assert linear_plan(CURRENT, "", True, True, module_type="linear") is plan
    assert linear_plan(CURRENT, "", True, False, module_type="linear") is not plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.emulate = True  # type: ignore[misc]


def test_arguments_are_not_modified() -> None:
    weight, x, bias = operands()
    args = arguments(CURRENT)
    before = [*map(copy.copy, args)]
    y = LinearFunction.apply(weight, x, bias, args)
    backward_args = y.grad_fn.backward_objects  # type: ignore[union-attr]
    scales, kept = copy.copy(args.scales), [*map(copy.copy, backward_args)]
    y.sum().backward()
    assert args.scales == scales and [*args] == before and [*backward_args] == kept


def test_only_quantized_operands_are_saved() -> None:
    weight, x, bias = operands()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        LinearFunction.apply(weight, x, bias, arguments(CURRENT))
    payload = [tensor for tensor in saved if tensor.numel() > 1 and tensor is not weight]
    assert {tensor.dtype.itemsize for tensor in payload} == {1}
    assert sum(tensor.numel() for tensor in payload) == x.numel()


def test_nothing_holds_the_module() -> None:
    """What crosses the boundary names no module, so that a graph does not keep one alive."""
    layer = nc.Linear(32, 48, device=DEVICE, dtype=DTYPE, recipe=CURRENT)
    y = layer(operands()[1])
    backward_args = y.grad_fn.backward_objects  # type: ignore[union-attr]
    assert not any(isinstance(value, nn.Module) or value is layer for value in backward_args)
    assert backward_args.fp8 and backward_args.backward_override is None


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("needs_weight", [False, True])
def test_only_wanted_gradients_are_made(needs_input: bool, needs_weight: bool) -> None:
    weight, x, bias = operands()
    weight.requires_grad_(needs_weight)
    x.requires_grad_(needs_input)
    bias.requires_grad_(False)
    y = LinearFunction.apply(weight, x, bias, arguments(CURRENT, needs_input, needs_weight, needs_bias=False))
    assert y.requires_grad is (needs_input or needs_weight)
    if y.requires_grad:
        y.sum().backward()
    assert (x.grad is not None) is needs_input
    assert (weight.grad is not None) is needs_weight
    assert bias.grad is None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dummy", ["", "zeros", "empty"])
def test_weight_gradients_into_main_grad(dummy: str, overwrite: bool) -> None:
    weight, x, bias = operands()
    expected = torch.autograd.grad(
        LinearFunction.apply(weight, x, bias, arguments(CURRENT, dtype=DTYPE)).float().sum(), weight
    )[0]
    main_grad = torch.ones(48, 32, device=DEVICE)
    args = arguments(CURRENT, wgrad=LinearWgrad(main_grad, overwrite, dummy))
    LinearFunction.apply(weight, x, bias, args).float().sum().backward()
    wanted = expected.float() + (0.0 if overwrite else 1.0)
    torch.testing.assert_close(main_grad, wanted, rtol=1e-2, atol=1e-2)
    assert (weight.grad is None) is (dummy == "")
    if dummy == "zeros":
        assert weight.grad is not None and not weight.grad.any()
