"""The boundary of a norm and a linear layer: what it saves, and that it is the two of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor

from narrowcast.autograd import (
    DelayedScales,
    LayerNormLinearFunction,
    LayerNormLinearFwdArgs,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    NormSettings,
    normalize,
)
from narrowcast.recipe import LinearPlan, linear_plan

DTYPE = torch.bfloat16
NORM = NormSettings("RMSNorm", 1e-5, False)


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input, weight of the norm, weight, bias)."""
    place: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "requires_grad": True}
    return (
        torch.randn(2, 16, 32, **place),
        torch.randn(32, **place),
        torch.randn(48, 32, **place),
        torch.randn(48, **place),
    )


def linear(plan: LinearPlan) -> LinearFwdArgs:
    return LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), True)


def run(tensors: tuple[Tensor, ...], plan: LinearPlan, **changes: Any) -> Any:
    x, norm_weight, weight, bias = tensors
    args = dataclasses.replace(LayerNormLinearFwdArgs(NORM, linear(plan), False, False), **changes)
    return LayerNormLinearFunction.apply(x, norm_weight, None, weight, bias, args)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "delayed"])
def test_is_a_norm_and_a_linear_layer(name: str) -> None:
    plan, tensors = linear_plan(QUANTIZED[name], "", True, True, module_type="linear"), operands()
    x, norm_weight, weight, bias = tensors
    results = []
    for fused in (True, False):
        torch.manual_seed(3)
        if fused:
            y = run(tensors, plan)
        else:
            y = LinearFunction.apply(weight, normalize(x, norm_weight, None, NORM), bias, linear(plan))
        results.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_the_norm_s_output_is_not_saved() -> None:
    plan, tensors = linear_plan(QUANTIZED["mxfp8"], "", True, True, module_type="linear"), operands()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        run(tensors, plan)
    wide = [tensor for tensor in saved if tensor.numel() >= tensors[0].numel() and tensor.dtype == DTYPE]
    assert {id(tensor) for tensor in wide} <= {id(tensors[0]), id(tensors[2])}


def test_what_is_returned_beside_the_output_takes_gradients() -> None:
    plan, tensors = linear_plan(QUANTIZED["mxfp8"], "", True, True, module_type="linear"), operands()
    y, normalized, passed = run(tensors, plan, return_layernorm_output=True, return_input=True)
    assert torch.equal(normalized, normalize(tensors[0], tensors[1], None, NORM))
    assert torch.equal(passed, tensors[0])
    (both,) = torch.autograd.grad((y.sum(), normalized.sum(), passed.sum()), tensors[0], retain_graph=True)
    parts = [
        torch.autograd.grad(one.sum(), tensors[0], retain_graph=True)[0] for one in (y, normalized, passed)
    ]
    torch.testing.assert_close(both, sum(parts), rtol=2e-2, atol=2e-2)
