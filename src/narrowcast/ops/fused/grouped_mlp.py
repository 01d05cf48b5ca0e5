"""F10: the experts of a mixture, two grouped linear layers with a scaled activation between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._checks import shown
from ...autograd.gemms import after
from ...dynamo import TensorProto
from ...functional import scaled_act
from ...recipe import MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from ...tensors import TensorOrQuantized
from ..basic.glu_channels import channels_to_halves
from ..basic.grouped_linear import GroupedLinear
from ..basic.scaled_activation import (
    ScaledActivationOperation,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)
from ..context import OperationContext
from ..contract import ExtraTensors, FusibleOperation, Gradients, ParameterGradients, TensorsToSave
from ..op import FusedOperation
from .pattern import Fusion, Match, Matched, NearMiss, exactly

GATED = (ScaledSwiGLU, ScaledClampedQGeGLU, ScaledSiTUGLU)
MULTIPLE, INTERLEAVE = 64, 32


class GroupedMLP(FusedOperation):
    """y_g = act(x_g w1_g^T) * s w2_g^T for every group g of rows; also the backward.

    With ``activation_recompute_in_mlp`` of the activation, nothing of its output is kept: the backward computes it once
    more from the activation's input, which is kept anyway, and quantizes it for the weight gradient of the second
    layer. Values are those of the three operations by themselves.
    """

    @property
    def _parts(self) -> tuple[GroupedLinear, ScaledActivationOperation, GroupedLinear]:
        return self.basic_ops  # type: ignore[return-value]

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        requires_grad: bool,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, ExtraTensors, list[TensorsToSave]]:
        recompute = requires_grad and self._parts[1].activation_recompute_in_mlp
        options: list[dict[str, Any]] = [{}, {}, {"save_input": recompute}]
        x: Any = input_
        to_save: list[TensorsToSave] = []
        for index, op in enumerate(self._basic_ops):
            x, _, saved = op.fuser_forward_compute(
                x,
                basic_op_extra_inputs=[basic_op_extra_inputs[index]],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[basic_op_kwargs[index]],
                requires_grad=requires_grad,
                **options[index],
            )
            to_save += saved
        return x, [(), (), ()], to_save

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        *,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        _, activation, fc2 = self._parts
        _, between, last = basic_op_ctxs
        save_input = activation.activation_recompute_in_mlp
        save_experts(
            self._parts, basic_op_ctxs, input_, tensors_to_save, basic_op_kwargs, save_input=save_input
        )
        recompute = save_input and between.requires_grad and fc2.wants_wgrad
        if recompute:
            saved, at = tensors_to_save[2], fc2.input_position
            last.save_for_backward(*saved[:at], None, *saved[at + 1 :])
        last.recompute = recompute  # type: ignore[attr-defined]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        no_extra_outputs: Any = {"basic_op_grad_extra_outputs": [()]}
        fc1, activation, fc2 = self._parts
        first, between, last = basic_op_ctxs
        if last.recompute:  # type: ignore[attr-defined]
            saved2 = list(last.saved_tensors)
            saved2[fc2.input_position] = _activated(activation, between, grad_output)
            last.saved_tensors = tuple(saved2)  # type: ignore[misc, attr-defined]  # of this backward alone
            del saved2
        # each takes its operands out of its context, so that they are gone when the next one runs
        grad, grads2, extra2 = fc2.fuser_backward([last], grad_output, **no_extra_outputs)
        grads1: ParameterGradients = [(None,) * len(list(fc1.parameters()))]
        extra1: ExtraTensors = [(None,) * fc1.num_extra_inputs]
        extra: ExtraTensors = [(None,)]
        grad_input: TensorOrQuantized | None = None
        if between.requires_grad and grad is not None:
            hidden, _, extra = activation.fuser_backward([between], grad, **no_extra_outputs)
            grad = None
            if first.requires_grad and hidden is not None:
                grad_input, grads1, extra1 = fc1.fuser_backward([first], hidden, **no_extra_outputs)
        return grad_input, [*grads1, (), *grads2], [*extra1, *extra, *extra2]


def save_experts(
    parts: tuple[GroupedLinear, Any, GroupedLinear],
    ctxs: list[OperationContext],
    input_: TensorOrQuantized,
    to_save: list[TensorsToSave],
    basic_op_kwargs: list[dict[str, Any]],
    **options: Any,
) -> None:
    """Save what the backwards of two layers and an activation between them read; ``options``: of the second layer."""
    fc1, _, fc2 = parts
    first, between, last = ctxs
    if first.requires_grad:
        fc1.fuser_forward_save_ctx([first], input_, to_save[:1], basic_op_kwargs=basic_op_kwargs[:1])
    if between.requires_grad:
        between.save_for_backward(*to_save[1])
    # the second layer's input does not exist; it only reads the shape and the dtype
    rows = math.prod(input_.shape[:-1])
    activated: Any = TensorProto((rows, fc2.in_features), fc1.activation_dtype(input_.dtype))
    fc2.fuser_forward_save_ctx([last], activated, to_save[2:], basic_op_kwargs=basic_op_kwargs[2:], **options)


def groups_reason(fc1: GroupedLinear, fc2: GroupedLinear) -> str | None:
    """Return how the groups of two layers differ; None if they do not."""
    if fc1.num_groups == fc2.num_groups:
        return None
    return f"the layers have {fc1.num_groups} and {fc2.num_groups} groups"


def features_reason(fc1: GroupedLinear, fc2: GroupedLinear, gated: bool) -> str | None:
    """Return why an activation does not fit between two layers; None if it does."""
    if fc1.out_features == fc2.in_features * (2 if gated else 1):
        return None
    return (
        f"the first layer has {fc1.out_features} output features, the second takes {fc2.in_features}: the "
        f"activation makes {'half' if gated else 'as many'}"
    )


def _activated(
    op: ScaledActivationOperation, ctx: OperationContext, grad_output: TensorOrQuantized
) -> Tensor:
    """Return the output of the activation, computed once more."""
    x: Any = ctx.saved_tensors[0]
    scale: Any = ctx.saved_tensors[1]
    x = channels_to_halves(x, op.glu_interleave_size)
    out = scaled_act(x, after(grad_output, scale), *op.formula)
    return out.reshape(-1, out.shape[-1])


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    kinds = (*GATED, ScaledSReLU)
    if not any(exactly(ops, start, GroupedLinear, kind, GroupedLinear) for kind in kinds):
        return None
    fc1: Any = ops[start]
    activation: Any = ops[start + 1]
    fc2: Any = ops[start + 2]
    reason = _recipe_reason(recipe) or groups_reason(fc1, fc2)
    if reason is not None:
        return NearMiss(reason)
    for size in (fc1.in_features, fc1.out_features, fc2.in_features, fc2.out_features):
        if size % MULTIPLE:
            return NearMiss(f"a layer has {size} features, not a multiple of {MULTIPLE}")
    gated = not isinstance(activation, ScaledSReLU)
    reason = features_reason(fc1, fc2, gated)
    if reason is not None:
        return NearMiss(reason)
    if gated and activation.glu_interleave_size != INTERLEAVE:
        return NearMiss(f"glu_interleave_size is {activation.glu_interleave_size}, not {INTERLEAVE}")
    return Match(3)


def _recipe_reason(recipe: Recipe | None) -> str | None:
    """Return why a recipe does not get the fused operation; None if it does."""
    if isinstance(recipe, NVFP4BlockScaling):
        if recipe.disable_rht:
            return "NVFP4BlockScaling has disable_rht=True"
    elif not isinstance(recipe, MXFP8BlockScaling):
        name = "none" if recipe is None else type(recipe).__name__
        return f"the recipe is {name}; MXFP8BlockScaling and NVFP4BlockScaling get it"
    if recipe.backward_override is not None:
        return f"the recipe has backward_override={shown(recipe.backward_override)}"
    return None


GROUPED_MLP = Fusion("GroupedMLP", "both", _match, GroupedMLP)
