"""The bias's sum from the pass that quantizes for the layer in front, against the list."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ops_checks import make_inputs, step
from recipes import DEVICE, RECIPES

import narrowcast as nc
from narrowcast import ops
from narrowcast.ops.fused.backward_linear_bias import BACKWARD_LINEAR_BIAS as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss

from .linear_lists import LEAD, K, N, check_fused, chosen, compare


def make(*behind: ops.BasicOperation) -> ops.Sequential:
    torch.manual_seed(1)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=torch.bfloat16)
    return ops.Sequential(linear, ops.Bias(N, device=DEVICE, dtype=torch.bfloat16), *behind)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "none"])
def test_changes_nothing(name: str) -> None:
    compare(make, FUSION, RECIPES[name], extra=False, entry="exact")


@pytest.mark.parametrize("frozen", ["0.weight", "1.bias"])
def test_frozen_parameters(frozen: str) -> None:
    def with_frozen() -> ops.Sequential:
        module = make()
        module.get_parameter(frozen).requires_grad_(False)
        return module

    compare(with_frozen, FUSION, RECIPES["current"], extra=False, entry="exact")


def test_whole_set() -> None:
    check_fused(make, RECIPES["delayed"], extra=False)


def test_the_activation_behind_comes_first() -> None:
    """Its kernel sums for the bias and quantizes in one pass."""
    module = make(ops.GELU())
    step(module, make_inputs([(*LEAD, K)]), RECIPES["current"])
    assert chosen(module, "backward") == ["BasicLinear", "BackwardActivationBias"]


def test_pattern() -> None:
    recipe = nc.recipe.Float8CurrentScaling()
    assert FUSION.look(list(make()), 0, recipe) == Match(2)
    assert FUSION.look(list(make())[:1], 0, recipe) is None
    for other, reason in (
        (None, "no recipe"),
        (dataclasses.replace(recipe, backward_override="dequantized"), "backward_override='dequantized'"),
    ):
        found = FUSION.look(list(make()), 0, other)
        assert isinstance(found, NearMiss) and found.reason.startswith(reason)
