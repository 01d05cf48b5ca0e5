"""BackwardActivationBias equals the list it stands for, bit for bit, and says why where it does not apply."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from modules import assert_same, randomized, step
from ops_checks import check, check_compiled, make_inputs, only, unfused
from recipes import DEVICE, QUANTIZED, RECIPES

import narrowcast as nc
from narrowcast import ops
from narrowcast.ops.fused.backward_activation_bias import BACKWARD_ACTIVATION_BIAS
from narrowcast.ops.fused.pattern import Match, NearMiss

FUSION = BACKWARD_ACTIVATION_BIAS
SHAPE = (4, 8, 40)


def make(activation: ops.BasicOperation, columns: int = 24) -> ops.Sequential:
    torch.manual_seed(2)
    kwargs: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    made = ops.Sequential(
        ops.BasicLinear(40, columns, **kwargs),
        ops.Bias(columns, **kwargs),
        activation,
        ops.BasicLinear(24, 40, **kwargs),
    )
    randomized(made)
    return made


def fused_names(module: ops.Sequential, recipe: Any) -> list[str]:
    """Names of the operations of the backward, in the order of the forward."""
    (group,) = module.groups()
    assert isinstance(group, ops.OperationFuser)
    return [type(op).__name__ for op, _ in group.fused(recipe, 0).backward]


@pytest.mark.parametrize("kind", [ops.GELU, ops.ReLU, ops.SwiGLU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_equals_the_list(recipe: str, kind: Any) -> None:
    columns = 48 if kind is ops.SwiGLU else 24
    fused, listed = make(kind(), columns), make(kind(), columns)
    for seed in range(2):
        inputs = make_inputs([SHAPE], seed=seed)
        with unfused():
            expected = step(listed, inputs, QUANTIZED[recipe])
        with only(backward=[FUSION]):
            assert_same(step(fused, inputs, QUANTIZED[recipe]), expected)
            assert fused_names(fused, QUANTIZED[recipe]) == [
                "BasicLinear",
                "BackwardActivationBias",
                "BasicLinear",
            ]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "block"])
def test_compiled(recipe: str) -> None:
    with only(backward=[FUSION]):
        check_compiled(make(ops.GELU()), [SHAPE], QUANTIZED[recipe], dynamic=recipe == "mxfp8")


def test_promises() -> None:
    with only(backward=[FUSION]):
        check(lambda: make(ops.ReLU(cache_quantized_input=True)), [SHAPE], RECIPES["current"])


@pytest.mark.parametrize("frozen", ["0.weight", "1.bias"])
def test_with_frozen_parameters(frozen: str) -> None:
    fused, listed = make(ops.GELU()), make(ops.GELU())
    for module in (fused, listed):
        module.get_parameter(frozen).requires_grad_(False)
    inputs = make_inputs([SHAPE])
    with unfused():
        expected = step(listed, inputs, RECIPES["current"])
    with only(backward=[FUSION]):
        assert_same(step(fused, inputs, RECIPES["current"]), expected)


def test_when_nothing_in_front_of_the_bias_has_a_backward() -> None:
    module = make(ops.GELU())
    module[0].requires_grad_(False)
    inputs = make_inputs([SHAPE], grad=False)
    with unfused():
        expected = step(module, inputs, RECIPES["mxfp8"])
    with only(backward=[FUSION]):
        assert_same(step(module, inputs, RECIPES["mxfp8"]), expected)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_behind_a_fused_forward(recipe: str) -> None:
    """The forward may be fused otherwise: what its operations save is the same."""
    inputs, forward = make_inputs([SHAPE]), ops.fused.FORWARD_FUSIONS
    with only(forward=forward):
        expected = step(make(ops.GELU()), inputs, QUANTIZED[recipe])
    with only(forward=forward, backward=[FUSION]):
        assert_same(step(make(ops.GELU()), inputs, QUANTIZED[recipe]), expected)


class PlainGradient(ops.FusedOperation):
    """A layer that takes its gradient in high precision although the recipe quantizes it."""

    def get_grad_output_quantizer(self) -> None:
        return None

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        return self.basic_ops[0].fuser_backward(basic_op_ctxs, grad_output, **kwargs)


def plain_first(operations: Any, *, recipe: Any) -> Any:
    return [PlainGradient(operations[:1]), *operations[1:]]


def test_behind_an_operation_that_takes_plain_gradients_after_all() -> None:
    inputs = make_inputs([SHAPE])
    with unfused():
        expected = step(make(ops.GELU()), inputs, RECIPES["current"])
    with only(backward=[plain_first, FUSION]):
        module = make(ops.GELU())
        assert_same(step(module, inputs, RECIPES["current"]), expected)
        assert fused_names(module, RECIPES["current"])[:2] == ["PlainGradient", "BackwardActivationBias"]


def look(*operations: Any, recipe: Any = RECIPES["current"], start: int = 1) -> Any:
    return FUSION.look(operations, start, recipe)


def test_where_it_applies() -> None:
    linear, bias, gelu, _ = make(ops.GELU())
    assert look(linear, bias, gelu) == Match(2)
    assert look(linear, gelu) is None and look(bias, gelu, start=0) is None
    override = dataclasses.replace(nc.recipe.Float8CurrentScaling(), backward_override="dequantized")
    misses = {
        "no recipe is in force": look(linear, bias, gelu, recipe=None),
        "backward_override='dequantized'": look(linear, bias, gelu, recipe=override),
        "Identity in front takes its gradient": look(ops.Identity(), bias, gelu),
        "glu_interleave_size moves": look(linear, bias, ops.SwiGLU(glu_interleave_size=4)),
    }
    for reason, found in misses.items():
        assert isinstance(found, NearMiss) and found.reason.startswith(reason)


def test_is_registered_and_explained() -> None:
    assert FUSION in ops.fused.BACKWARD_FUSIONS
    explanation = make(ops.GELU()).explain(RECIPES["mxfp8"])
    assert "BackwardActivationBias" in [one.name for one in explanation.backward]
    explanation = make(ops.GELU()).explain(None)
    assert ("BackwardActivationBias", 1) in [(miss.name, miss.number) for miss in explanation.near_misses]
