"""BackwardAddRMSNorm: the gradients of a residual branch and of the norm beside it, in one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import assert_same, randomized, step
from ops_checks import check, check_compiled, make_inputs, only, unfused
from recipes import DEVICE, QUANTIZED, RECIPES

from narrowcast import ops
from narrowcast.ops.fused.backward_add_rmsnorm import BACKWARD_ADD_RMSNORM
from narrowcast.ops.fused.pattern import Match, NearMiss

FUSION = BACKWARD_ADD_RMSNORM
SHAPE = (4, 8, 40)


def make(dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
    torch.manual_seed(2)
    kwargs: Any = {"device": DEVICE, "dtype": dtype}
    made = ops.Sequential(
        ops.BasicLinear(40, 40, **kwargs),
        ops.MakeExtraOutput(),
        ops.RMSNorm(40, **kwargs),
        ops.BasicLinear(40, 24, **kwargs),
    )
    randomized(made)
    return made


def channelled() -> ops.Sequential:
    """A whole residual branch: what goes around the norm comes back in at the end."""
    torch.manual_seed(2)
    kwargs: Any = {"device": DEVICE, "dtype": torch.float32}
    opening, closing = ops.MakeExtraOutput(), ops.AddExtraInput()
    opening.set_extra_output_channel(0, "residual", output_to_caller=False)
    closing.set_extra_input_channel(0, "residual")
    made = ops.Sequential(opening, ops.RMSNorm(40, **kwargs), ops.BasicLinear(40, 40, **kwargs), closing)
    randomized(made)
    return made


def fused_names(module: ops.Sequential, recipe: Any = None) -> list[str]:
    (group,) = module.groups()
    assert isinstance(group, ops.OperationFuser)
    return [type(op).__name__ for op, _ in group.fused(recipe, 0).backward]


def test_equals_the_list() -> None:
    """In fp32 within a rounding: the list rounds the norm's gradient before it adds."""
    inputs = make_inputs([SHAPE], dtype=torch.float32)
    with unfused():
        expected = step(make(torch.float32), inputs, None)
    with only(backward=[FUSION]):
        module = make(torch.float32)
        found = step(module, inputs, None)
        assert "BackwardAddRMSNorm" in fused_names(module)
    assert found.keys() == expected.keys() and found["d input0"].abs().sum() > 0
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def separate_gradients(grad: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, norm: Any) -> Any:
    """In fp64."""
    wide = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    y = torch.nn.functional.rms_norm(wide, weight.shape, weight, norm.settings.eps)
    return torch.autograd.grad((y, wide * 1.0), (wide, weight), (grad.double(), extra.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_adds_before_it_rounds(dtype: torch.dtype) -> None:
    norm = ops.RMSNorm(50, device=DEVICE, dtype=dtype)
    randomized(norm)
    module = ops.Sequential(ops.MakeExtraOutput(), norm)
    x, grad, extra = make_inputs([(7, 50), (7, 50), (7, 50)], dtype=dtype)
    with only(backward=[FUSION]):
        out, copied = module(x)
        dx, dweight = torch.autograd.grad((out, copied), (x, norm.weight), (grad, extra))
    assert torch.equal(copied, x)
    exact_dx, exact_dweight = separate_gradients(grad, extra, x, norm)
    half_ulp = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(dx.double(), exact_dx, rtol=half_ulp * 1.01, atol=1e-5)
    torch.testing.assert_close(dweight.double(), exact_dweight, rtol=half_ulp * 1.01, atol=1e-5)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_quantizing_for_the_layer_in_front_changes_no_bit(recipe: str) -> None:
    module, first, rest = make(), make()[:1], make()[1:]
    with only(backward=[FUSION]):
        for seed in range(2):
            inputs = make_inputs([SHAPE], seed=seed)
            found = step(module, inputs, QUANTIZED[recipe])
            expected = step(torch.nn.Sequential(first, rest), inputs, QUANTIZED[recipe])
            assert found.keys() - expected.keys() == {name for name in found if ".weight" in name}
            assert_same(
                {name: found[name] for name in ("out0", "out1", "d input0")},
                {name: expected[name] for name in ("out0", "out1", "d input0")},
            )


def test_without_a_gradient_of_the_extra_output() -> None:
    inputs = make_inputs([SHAPE])

    def only_the_output(module: ops.Sequential) -> Any:
        return step(module, inputs, RECIPES["mxfp8"], lambda x: module(x)[0])

    with unfused():
        expected = only_the_output(make())
    with only(backward=[FUSION]):
        assert_same(only_the_output(make()), expected)


def test_compiled() -> None:
    with only(backward=[FUSION]):
        check_compiled(make(), [SHAPE], QUANTIZED["nvfp4"])


def test_promises_with_a_channel() -> None:
    with only(backward=[FUSION]):
        check(channelled, [SHAPE], dtype=torch.float32)
        assert fused_names(channelled()) == ["BackwardAddRMSNorm", "BasicLinear", "AddExtraInput"]
        found = step(channelled(), make_inputs([SHAPE], dtype=torch.float32))
    with unfused():
        expected = step(channelled(), make_inputs([SHAPE], dtype=torch.float32))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-4, msg=name)


def test_where_it_applies() -> None:
    norm = ops.RMSNorm(40, device=DEVICE)
    assert FUSION.look([ops.MakeExtraOutput(), norm], 0, None) == Match(2)
    assert FUSION.look([ops.Identity(), norm], 0, None) is None
    missed = FUSION.look([ops.MakeExtraOutput(in_place=True), norm], 0, None)
    assert isinstance(missed, NearMiss) and "in_place=True" in missed.reason
    assert FUSION in ops.fused.BACKWARD_FUSIONS
