"""F6: the gradient of an extra output added to the GEMM's, against the list."""

from __future__ import annotations

import pytest
import torch
from ops_checks import make_inputs
from recipes import DEVICE, RECIPES

from narrowcast import ops
from narrowcast.ops.fused.backward_linear import BACKWARD_LINEAR_ADD as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss

from .linear_lists import LEAD, K, N, check_fused, chosen, compare


def make(in_place: bool = True) -> ops.Sequential:
    torch.manual_seed(1)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=torch.bfloat16)
    return ops.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)


@pytest.mark.parametrize("name", RECIPES)
def test_is_the_list(name: str) -> None:
    compare(make, FUSION, RECIPES[name], extra=False, entry="exact")


@pytest.mark.parametrize("name", ["delayed", "custom"])
def test_whole_set(name: str) -> None:
    check_fused(make, RECIPES[name], extra=False)


def test_extra_output_that_nobody_reads() -> None:
    module, (x,) = make(), make_inputs([(*LEAD, K)])
    out, _ = module(x)
    assert chosen(module, "backward") == ["BackwardLinearAdd"]
    (alone,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(module[1](x).sum(), x)
    assert torch.equal(alone, expected)


def test_gradient_of_the_extra_output_is_not_written_to() -> None:
    module, (x,) = make(), make_inputs([(*LEAD, K)])
    grads = make_inputs([(*LEAD, N), (*LEAD, K)], grad=False, seed=3)
    before = grads[1].clone()
    torch.autograd.backward(module(x), grads)
    assert torch.equal(grads[1], before)


def test_pattern() -> None:
    assert FUSION.look(list(make()), 0, None) == Match(2)
    found = FUSION.look(list(make(in_place=False)), 0, None)
    assert isinstance(found, NearMiss) and "in_place=False" in found.reason
    assert FUSION.look(list(make()), 1, None) is None
