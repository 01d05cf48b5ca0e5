"""The boundary of a feed-forward block: that it is its four parts, and that recomputation changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor

from narrowcast.autograd import (
    ActivationSettings,
    DelayedScales,
    LayerNormLinearFunction,
    LayerNormLinearFwdArgs,
    LayerNormMLPFunction,
    LayerNormMLPFwdArgs,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    NormSettings,
    activate,
)
from narrowcast.recipe import linear_plan

DTYPE = torch.bfloat16
NORM, SWIGLU = NormSettings("RMSNorm", 1e-5, False), ActivationSettings("swiglu", ())


def operands() -> list[Tensor]:
    """Input, weight of the norm, weights of fc1 and fc2."""
    place: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "requires_grad": True}
    return [torch.randn(shape, **place) for shape in ((2, 16, 32), (32,), (128, 32), (32, 64))]


def results(name: str, tensors: list[Tensor], run: Any) -> list[Tensor]:
    torch.manual_seed(3)
    linear = LinearFwdArgs(
        linear_plan(QUANTIZED[name], "", True, True, module_type="linear"),
        DTYPE,
        DelayedScales(),
        None,
        LinearWgrad(),
        False,
    )
    y = run(linear, *tensors)
    return [y, *torch.autograd.grad(y.float().square().sum(), tensors)]


def block(linear: LinearFwdArgs, x: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor, plans: Any = None) -> Any:
    args = LayerNormMLPFwdArgs(NORM, SWIGLU, linear, linear, False, plans)
    return LayerNormMLPFunction.apply(x, norm, None, fc1, None, fc2, None, None, args)


def parts(linear: LinearFwdArgs, x: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor) -> Any:
    first = LayerNormLinearFwdArgs(NORM, linear, False, False)
    hidden = LayerNormLinearFunction.apply(x, norm, None, fc1, None, first)
    return LinearFunction.apply(fc2, activate(hidden, SWIGLU), None, linear)


@pytest.mark.parametrize("name", ["current", "mxfp8", "block"])
def test_is_its_four_parts(name: str) -> None:
    tensors = operands()
    for ours, theirs in zip(results(name, tensors, block), results(name, tensors, parts), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_recomputation_saves_operands_alone_and_changes_nothing(name: str) -> None:
    tensors, plan = operands(), linear_plan(QUANTIZED[name], "", False, False, module_type="linear")
    saved: list[Tensor] = []

    def recomputed(linear: LinearFwdArgs, *operands: Tensor) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return block(linear, *operands, plans=(plan, plan))

    again, plain = results(name, tensors, recomputed), results(name, tensors, block)
    if name == "current":
        assert all(map(torch.equal, again, plain))
    assert torch.equal(again[0], plain[0])
    assert {id(tensor) for tensor in saved} <= {id(tensor) for tensor in tensors}
