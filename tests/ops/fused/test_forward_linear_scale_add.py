"""F4: GEMM, factor and extra input in one, against the list."""

from __future__ import annotations

import pytest
import torch
from modules import step
from ops_checks import make_inputs
from recipes import DEVICE, RECIPES

from narrowcast import ops
from narrowcast.ops.fused.forward_linear import FORWARD_LINEAR_SCALE_ADD as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss

from .linear_lists import LEAD, K, N, check_fused, compare


def make(scale: float = 0.3, in_place: bool = True) -> ops.Sequential:
    torch.manual_seed(1)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=torch.bfloat16)
    return ops.Sequential(linear, ops.ConstantScale(scale), ops.AddExtraInput(in_place=in_place))


@pytest.mark.parametrize("name", RECIPES)
def test_rounds_once_less_than_the_list(name: str) -> None:
    flips = {"none": "bf16_output", "nvfp4": "fp4_layer"}.get(name, "fp8_flips")
    compare(make, FUSION, RECIPES[name], extra=True, entry="bf16_output", gradients=flips)


@pytest.mark.parametrize("name", RECIPES)
def test_a_power_of_two_changes_nothing(name: str) -> None:
    compare(lambda: make(0.5), FUSION, RECIPES[name], extra=True, entry="exact")


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_whole_set(name: str) -> None:
    check_fused(make, RECIPES[name], extra=True)


def test_extra_input_is_not_written_to() -> None:
    module, (x, extra) = make(), make_inputs([(*LEAD, K), (*LEAD, N)])
    before = extra.detach().clone()
    step(module, [x, extra])
    assert torch.equal(extra, before)


def test_pattern() -> None:
    assert FUSION.look(list(make()), 0, None) == Match(3)
    found = FUSION.look(list(make(in_place=False)), 0, None)
    assert isinstance(found, NearMiss) and "in_place=False" in found.reason
    assert FUSION.look(list(make())[:2], 0, None) is None
