"""F2: GEMM, bias and extra input in one, against the list."""

from __future__ import annotations

import pytest
import torch
from modules import step
from ops_checks import make_inputs
from recipes import DEVICE, RECIPES

from narrowcast import ops
from narrowcast.ops.fused.forward_linear import FORWARD_LINEAR_BIAS_ADD as FUSION
from narrowcast.ops.fused.pattern import Match, NearMiss

from .linear_lists import LEAD, K, N, check_fused, compare


def make(bias: bool = True, in_place: bool = True, dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
    torch.manual_seed(1)
    added = [ops.Bias(N, device=DEVICE, dtype=dtype)] * bias
    for op in added:
        torch.nn.init.normal_(op.bias)
    linear = ops.BasicLinear(K, N, device=DEVICE, dtype=dtype)
    return ops.Sequential(linear, *added, ops.AddExtraInput(in_place=in_place))


@pytest.mark.parametrize("name", RECIPES)
def test_without_bias_it_is_the_list(name: str) -> None:
    compare(lambda: make(bias=False), FUSION, RECIPES[name], extra=True, entry="exact")


@pytest.mark.parametrize("name", RECIPES)
def test_with_bias_it_rounds_once_less(name: str) -> None:
    flips = {"none": "bf16_output", "nvfp4": "fp4_layer"}.get(name, "fp8_flips")
    compare(make, FUSION, RECIPES[name], extra=True, entry="bf16_output", gradients=flips)


@pytest.mark.parametrize("name", ["none", "nvfp4"])
def test_whole_set(name: str) -> None:
    check_fused(make, RECIPES[name], extra=True)


def test_extra_input_is_not_written_to() -> None:
    module, (x, extra) = make(), make_inputs([(*LEAD, K), (*LEAD, N)])
    before = extra.detach().clone()
    step(module, [x, extra])
    with torch.no_grad():
        module(x, extra)
    assert torch.equal(extra, before)


def test_extra_input_of_another_dtype_is_promoted() -> None:
    module, (x,) = make(bias=False), make_inputs([(*LEAD, K)])
    extra = torch.randn(*LEAD, N, device=DEVICE, requires_grad=True)
    results = step(module, [x, extra])
    assert results["out0"].dtype == torch.float32 and results["d input1"].dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(results["out0"], module[0](x) + extra)


def test_extra_input_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"extra input has shape \(3, 8, 79\), .* \(3, 8, 80\)"):
        make()(*make_inputs([(*LEAD, K), (*LEAD, N - 1)]))


def test_pattern() -> None:
    basic = list(make())
    assert FUSION.look(basic, 0, None) == Match(3)
    assert FUSION.look(list(make(bias=False)), 0, None) == Match(2)
    assert FUSION.look(basic, 1, None) is None
    found = FUSION.look(list(make(in_place=False)), 0, None)
    assert isinstance(found, NearMiss) and "in_place=False" in found.reason


def test_a_subclass_computes_for_itself() -> None:
    class Doubled(ops.BasicLinear):
        def op_forward_compute(self, input_, **kwargs):
            out, saved = super().op_forward_compute(input_, **kwargs)
            return out * 2, saved

        def op_forward_save_ctx(self, *args, **kwargs) -> None:
            super().op_forward_save_ctx(*args, **kwargs)

    module, (x, extra) = make(), make_inputs([(*LEAD, K), (*LEAD, N)])
    other = ops.Sequential(Doubled(K, N, device=DEVICE, dtype=torch.bfloat16), *list(module)[1:])
    other[0].weight = module[0].weight
    with torch.no_grad():
        assert torch.equal(other(x, extra), 2 * module[0](x) + module[1].bias + extra)
