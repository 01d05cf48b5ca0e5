"""F3: the bias in the GEMM, against the list."""

from __future__ import annotations

import pytest
import torch
from modules import step
from ops_checks import make_inputs
from recipes import DEVICE, RECIPES

import narrowcast as nc
from narrowcast import ops
from narrowcast.ops.fused.forward_linear import FORWARD_LINEAR_BIAS_ACTIVATION as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss

from ..linear_modules import assert_as_module
from .linear_lists import LEAD, K, N, check_fused, compare


def make(dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
    torch.manual_seed(1)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=dtype)
    bias = ops.Bias(N, device=DEVICE, dtype=dtype)
    torch.nn.init.normal_(bias.bias)
    return ops.Sequential(linear, bias)


@pytest.mark.parametrize("name", RECIPES)
def test_rounds_once_less_than_the_list(name: str) -> None:
    flips = {"none": "bf16_output", "nvfp4": "fp4_layer"}.get(name, "fp8_flips")
    compare(make, FUSION, RECIPES[name], extra=False, entry="bf16_output", gradients=flips)


@pytest.mark.parametrize("name", RECIPES)
def test_is_the_module_with_bias(name: str) -> None:
    """Bit for bit, all gradients: the bias's sum comes from the pass that quantizes the gradient."""
    ours = make()
    module = nc.Linear(K, N, device=DEVICE, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(ours[0].weight)
        module.bias.copy_(ours[1].bias)
    inputs = make_inputs([(*LEAD, K)])
    found, expected = step(ours, inputs, RECIPES[name]), step(module, inputs, RECIPES[name])
    renamed = {"d 0.weight": "d weight", "d 1.bias": "d bias"}
    found = {renamed.get(key, key): value for key, value in found.items()}
    if name == "none":  # PyTorch sums the bias gradient in another order
        nc.testing.assert_close(found.pop("d bias"), expected.pop("d bias"), "bf16_output")
    assert_as_module(name, found, expected)


def test_whole_set() -> None:
    check_fused(make, RECIPES["delayed"], extra=False)


def test_frozen_linear_and_a_bias_that_learns() -> None:
    module = make()
    module[0].weight.requires_grad_(False)
    inputs = make_inputs([(*LEAD, K)], grad=False)
    results = step(module, inputs, RECIPES["current"])
    assert results.keys() == {"out0", "d 1.bias"}
    with torch.no_grad():
        expected = (2 * results["out0"].float()).to(torch.bfloat16).reshape(-1, N).float().sum(dim=0)
    nc.testing.assert_close(results["d 1.bias"], expected, "bf16_output")


def test_pattern() -> None:
    assert FUSION.look(list(make()), 0, None) == Match(2)
    found = FUSION.look(list(make(torch.float32)), 0, None)
    assert isinstance(found, NearMiss) and "torch.float32" in found.reason
    assert FUSION.look(list(make())[:1], 0, None) is None
