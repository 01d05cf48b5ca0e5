"""F7: a factor in the scale of the quantized gradient, against the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import step
from ops_checks import make_inputs, unfused
from recipes import DEVICE, RECIPES

import narrowcast as nc
from narrowcast import ops
from narrowcast.ops.fused.backward_linear import BACKWARD_LINEAR_SCALE as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss
from narrowcast.recipe import Float8CurrentScaling
from narrowcast.testing import assert_close

from .linear_lists import LEAD, K, N, check_fused, compare


def make(scale: float = 0.3, *behind: Any) -> ops.Sequential:
    torch.manual_seed(1)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=torch.bfloat16)
    return ops.Sequential(linear, ops.ConstantScale(scale), *behind)


@pytest.mark.parametrize("scale", [0.5, -4.0])
def test_a_power_of_two_changes_nothing(scale: float) -> None:
    compare(lambda: make(scale), FUSION, RECIPES["current"], extra=False, entry="exact")


@pytest.mark.parametrize("scale", [0.3, -1.7])
def test_any_factor_saves_a_rounding(scale: float) -> None:
    compare(lambda: make(scale), FUSION, RECIPES["current"], extra=False, entry="fp8_flips")


@pytest.mark.parametrize("scale", [0.3, 0.5])
def test_gradient_that_comes_quantized(scale: float) -> None:
    """A bias behind quantizes what the GEMMs read, and the factor still goes into the scale."""

    def with_bias() -> ops.Sequential:
        return make(scale, ops.Bias(N, device=DEVICE, dtype=torch.bfloat16))

    entry = "exact" if scale == 0.5 else "fp8_flips"
    ours, inputs = with_bias(), make_inputs([(*LEAD, K)])
    results = step(ours, inputs, RECIPES["current"])
    with unfused():
        expected = step(with_bias(), inputs, RECIPES["current"])
    for name in expected:
        assert_close(results[name], expected[name], entry)


def test_frozen_weight_and_frozen_input() -> None:
    for frozen in ("weight", "input"):
        module, inputs = make(0.5), make_inputs([(*LEAD, K)], grad=frozen != "input")
        module[0].weight.requires_grad_(frozen != "weight")
        results = step(module, inputs, RECIPES["current"])
        with unfused():
            expected = step(module, inputs, RECIPES["current"])
        assert results.keys() == expected.keys() and len(results) == 2
        for name in expected:
            assert_close(results[name], expected[name], "exact")


def test_whole_set() -> None:
    check_fused(make, RECIPES["current"], extra=False)


@pytest.mark.parametrize("name", RECIPES)
def test_pattern(name: str) -> None:
    found = FUSION.look(list(make()), 0, RECIPES[name])
    assert found == Match(2) if name == "current" else isinstance(found, NearMiss)


def test_near_misses_say_why() -> None:
    for recipe, reason in (
        (None, "high precision"),
        (Float8CurrentScaling(backward_override="dequantized"), "high precision"),
        (Float8CurrentScaling(use_power_2_scales=True), "powers of two"),
        (nc.recipe.MXFP8BlockScaling(), "blocks"),
    ):
        found = FUSION.look(list(make()), 0, recipe)
        assert isinstance(found, NearMiss) and reason in found.reason
