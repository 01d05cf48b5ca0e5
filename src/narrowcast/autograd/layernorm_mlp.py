"""The autograd function of a norm, a linear layer, an activation and a second linear layer: one boundary.

    forward    norm -> fc1 -> activation -> fc2; the norm and the activation hand over quantized operands
    backward   fc2 dgrad and wgrad -> activation backward, quantized, with fc1's bias gradient -> fc1 dgrad and wgrad
               -> norm backward

With ``forward_plans`` only the operands of the boundary are saved, and the backward computes the rest once more: from
the same scales, and collecting no amax. The rules of :mod:`.gemms` hold here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import act, act_backward, act_backward_quantize, act_quantize, draw_seed, replay_of
from ..quantizers import OperandBuffers, Quantizer, buffers_of
from ..recipe import LinearPlan
from ..tensors import QuantizedTensorStorage
from .activation import ActivationSettings
from .arguments import DelayedScales, LinearBwdArgs, LinearFwdArgs, LinearWgrad
from .gemms import (
    Gradients,
    SavedOperand,
    after,
    fprop,
    linear_backward,
    linear_bwd_args,
    quantized_gradients,
    saved_operand,
    split_operand,
    weight_operand,
    with_saved,
)
from .linear import saved_tensors
from .norm import NormSettings, norm_gradients, normalized_operand


@dataclass(slots=True)
class LayerNormMLPFwdArgs:
    """What the forward reads besides its tensors.

    ``fc1.plan.needs_input``: the norm has a backward. ``fc2.plan.needs_input``: the activation has one.
    ``forward_plans``: of fc1 and fc2 for a forward that makes nothing for the backward, which computes it again.
    """

    norm: NormSettings
    activation: ActivationSettings
    fc1: LinearFwdArgs
    fc2: LinearFwdArgs
    return_layernorm_output: bool
    forward_plans: tuple[LinearPlan, LinearPlan] | None


@dataclass(slots=True)
class LayerNormMLPBwdArgs:
    """What the backward reads besides saved tensors; never changed, so that it may run again.

    ``recompute``: how to compute the forward once more, where only its operands were saved. ``with_residual``: the
    norm was that of a sum, which was returned last.
    """

    norm: NormSettings
    activation: ActivationSettings
    fc1: LinearBwdArgs
    fc2: LinearBwdArgs
    recompute: Recomputation | None
    with_residual: bool

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.fc2.backward_override

    @property
    def fp8(self) -> bool:
        """Whether the layer ran quantized."""
        return self.fc2.fp8

    @property
    def grad_output_quantizer(self) -> Quantizer | None:
        """What quantizes the gradient of the output."""
        return self.fc2.grad_output_quantizer

    @property
    def reduce_and_update_bwd_fp8_tensors(self) -> bool:
        """Whether the backward renews scales: never, the next step does."""
        return False


@dataclass(slots=True)
class Recomputation:
    """Arguments of the forward that the backward runs again, without tensors.

    ``weights``: for fc1 and fc2, where the weight was quantized already: how many buffers it has row-wise and
    column-wise, and their quantizer.
    """

    forward: LayerNormMLPFwdArgs
    weights: tuple[tuple[int, int, Quantizer] | None, ...]


class _Tensors(NamedTuple):
    """The operands of the boundary; in a recomputation, a weight is None where its buffers serve."""

    inp: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    fc1_weight: Any
    fc1_bias: Tensor | None
    fc2_weight: Any
    fc2_bias: Tensor | None
    residual: Tensor | None


class _Saved(NamedTuple):
    """The tensors that the backward reads; those that it does not need are None."""

    of_norm: list[Tensor | None]
    fc1_out: Tensor | None
    fc1_input: SavedOperand
    fc1_weight: SavedOperand
    fc2_input: SavedOperand
    fc2_weight: SavedOperand

    def flat(self) -> list[Tensor | None]:
        """Its tensors, in order."""
        fc1 = [*self.fc1_input.tensors, *self.fc1_weight.tensors]
        return [*self.of_norm, self.fc1_out, *fc1, *self.fc2_input.tensors, *self.fc2_weight.tensors]


def _forward(
    tensors: _Tensors, args: LayerNormMLPFwdArgs, features: int, with_fc2: bool = True
) -> tuple[Any, list[Tensor], Tensor, _Saved]:
    """(output (*lead, H), what is returned beside it, what was normalized, what the backward reads).

    Without fc2's GEMM there is no output. Beside it: the norm's output where ``args`` ask for it, and the sum with a
    residual; both (*lead, H).

    Args:
        features: rows of fc1's weight.
    """
    inp, residual, fc1, fc2 = tensors.inp, tensors.residual, args.fc1, args.fc2
    x = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
    normalized = normalized_operand(
        x,
        None if residual is None else residual.reshape(x.shape),
        tensors.norm_weight,
        tensors.norm_bias,
        args.norm,
        fc1,
        args.return_layernorm_output,
    )
    if residual is not None:
        inp = normalized.summed.view(inp.shape)
    w1, saved_w1 = weight_operand(tensors.fc1_weight, fc1)
    operand, rows, kept = normalized.operand, x.shape[0], None
    if fc1.parallel is not None:
        operand, kept, rows = split_operand(fc1, fc1.parallel, operand, normalized.output, rows)
    hidden = fprop(fc1, operand, w1, tensors.fc1_bias, rows, features)  # type: ignore[arg-type]
    activated, activation = _activated_operand(hidden, args)
    w2, saved_w2 = weight_operand(tensors.fc2_weight, fc2)
    saved = _Saved(
        [inp, tensors.norm_weight, normalized.mean, normalized.rstd]
        if fc1.plan.needs_input
        else [None, None, None, None],
        hidden if fc2.plan.needs_input else None,
        kept or saved_operand(operand, normalized.output, fc1.plan.needs_weight, fc1.plan.backward_override),  # type: ignore[arg-type]
        saved_w1,
        saved_operand(activated, activation, fc2.plan.needs_weight, fc2.plan.backward_override),
        saved_w2,
    )
    if not with_fc2:
        return None, [], inp, saved
    out = fprop(fc2, activated, w2, tensors.fc2_bias, rows, inp.shape[-1])
    if fc2.parallel is not None:
        out = fc2.parallel.reduced_output(out)
    beside = []
    if args.return_layernorm_output:
        beside.append(normalized.output.view(inp.shape))  # type: ignore[union-attr]
    if residual is not None:
        beside.append(inp)
    return out if inp.dim() == 2 else out.view(inp.shape), beside, inp, saved


def _activated_operand(hidden: Tensor, args: LayerNormMLPFwdArgs) -> tuple[OperandBuffers, Tensor | None]:
    """fc2's input, quantized, and in high precision where the backward reads that."""
    plan, scales, settings = args.fc2.plan, args.fc2.scales, args.activation
    name, parameters = settings.activation, list(settings.parameters)
    if plan.needs_weight and plan.backward_override == "high_precision":
        output = act(hidden, name, parameters)
        return plan.input.quantize(output, scales.scale_fwd, scales.amax_fwd), output
    seed = draw_seed(hidden) if plan.input.stochastic else None
    buffers = act_quantize(
        hidden, name, plan.input.quantizer, parameters, seed, scales.scale_fwd, scales.amax_fwd
    )
    return plan.input.split(buffers), None


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(
    args: LayerNormMLPBwdArgs,
    saved: list[Any],
    dy: Tensor,
    beside: tuple[Tensor, ...],
    scales: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of the eight operands, in their order. Empties ``saved`` on the way, so that it is freed.

    Args:
        beside: gradients of what was returned beside the output.
    """
    fc1, fc2 = args.fc1, args.fc2
    grad_normalized, grad_summed = (beside[:-1], beside[-1]) if args.with_residual else (beside, None)
    w2 = _pop_last(saved, fc2.saved_weight[0])
    x2 = _pop_last(saved, fc2.saved_input[0])
    dw2, d_act, db2 = linear_backward(fc2, dy, x2, w2, scales[1])
    del w2, x2
    if d_act is None:
        return None, None, None, None, None, dw2, db2, None
    w1 = _pop_last(saved, fc1.saved_weight[0])
    x1 = _pop_last(saved, fc1.saved_input[0])
    inp, norm_weight, mean, rstd, fc1_out = saved
    saved.clear()
    large = [fc1_out, d_act]  # what the callee takes out it can let go of, too
    del fc1_out, d_act
    dw1, grad, db1 = _fc1_backward(args, large, x1, w1, scales[0])
    del w1, x1
    if grad is None:
        return None, None, None, dw1, db1, dw2, db2, None
    if grad_normalized:
        grad = grad + grad_normalized[0].reshape(grad.shape)
    dx, *of_norm = norm_gradients(grad, inp, norm_weight, mean, rstd, args.norm, grad_summed)
    return dx, *of_norm, dw1, db1, dw2, db2, dx if args.with_residual else None


def _pop_last(tensors: list[Any], count: int) -> list[Any]:
    """The last ``count`` tensors, in order, which the list loses."""
    return [tensors.pop() for _ in range(count)][::-1]


def _fc1_backward(
    args: LayerNormMLPBwdArgs,
    large: list[Tensor],
    inp: list[Tensor],
    weight: list[Tensor],
    scale_bwd: Tensor | None,
) -> Gradients:
    """(wgrad, dgrad, grad_bias) of fc1.

    Args:
        large: fc1's output and the gradient of the activation; empty afterwards.
    """
    d_act, fc1_out = large.pop(), large.pop()
    fc1, plan, settings = args.fc1, args.fc1.plan, args.activation
    name, parameters = settings.activation, list(settings.parameters)
    if plan.backward_override is not None or not (plan.needs_input or plan.needs_weight):
        grad_hidden = act_backward(d_act, fc1_out, name, parameters)
        return linear_backward(fc1, grad_hidden, inp, weight, scale_bwd)
    operand, grad_bias, rows = plan.grad_output, None, d_act.shape[0]
    buffers = act_backward_quantize(
        d_act,
        fc1_out,
        name,
        operand.quantizer,
        parameters,
        fc1.needs_bias,
        draw_seed(d_act) if operand.stochastic else None,
        scale_bwd,
        fc1.amax_bwd,
    )
    del fc1_out, d_act
    if fc1.needs_bias:
        *buffers, sums = buffers
        grad_bias = sums.to(fc1.bias_dtype)
    grad = operand.split(buffers)
    del buffers
    return quantized_gradients(fc1, grad, grad_bias, inp, weight, rows)


# -- recomputation -----------------------------------------------------------------------------------------------------


def _for_recomputation(
    tensors: _Tensors, args: LayerNormMLPFwdArgs
) -> tuple[Recomputation, list[Tensor | None]]:
    """(how to compute the forward again, what to save: operands, scales, buffers of weights quantized already)."""
    to_save: list[Tensor | None] = [*tensors, args.fc1.scales.scale_fwd, args.fc2.scales.scale_fwd]
    stages, weights = [], []
    for position, stage in ((3, args.fc1), (5, args.fc2)):
        weight, operand = tensors[position], stage.workspace
        if isinstance(weight, QuantizedTensorStorage):
            to_save[position] = None
            operand = buffers_of(weight) if operand is None else operand
        weights.append(
            None if operand is None else (len(operand.rowwise), len(operand.columnwise), operand.quantizer)
        )
        to_save += [] if operand is None else [*operand.rowwise, *operand.columnwise]
        stages.append(replace(stage, scales=DelayedScales(), workspace=None, wgrad=LinearWgrad()))
    forward = replace(args, fc1=stages[0], fc2=stages[1], return_layernorm_output=False)
    return Recomputation(forward, tuple(weights)), to_save


def _recompute(
    args: LayerNormMLPBwdArgs, recomputation: Recomputation, kept: Sequence[Any], dy: Tensor
) -> _Saved:
    """What :func:`_forward` would have saved, without the GEMM of fc2."""
    tensors, scales, buffers = _Tensors(*kept[:8]), kept[8:10], list(kept[10:])
    stages = []
    for stage, weight, scale in zip(
        (recomputation.forward.fc1, recomputation.forward.fc2), recomputation.weights, scales
    ):
        workspace = None
        if weight is not None:
            rowwise, columnwise, quantizer = weight
            own, buffers = buffers[: rowwise + columnwise], buffers[rowwise + columnwise :]
            workspace = OperandBuffers(own[:rowwise], own[rowwise:], quantizer)
        stages.append(replace(stage, workspace=workspace, scales=DelayedScales(scale)))
    forward = replace(recomputation.forward, fc1=stages[0], fc2=stages[1])
    repeated = tensors._replace(norm_weight=after(dy, tensors.norm_weight))
    *_, saved = _forward(repeated, forward, args.fc1.shape[0], with_fc2=False)
    if saved.of_norm[1] is not None:
        saved.of_norm[1] = tensors.norm_weight
    return saved


# -- the boundary ------------------------------------------------------------------------------------------------------


class LayerNormMLPFunction(torch.autograd.Function):
    """Norm, quantized linear layer, activation, quantized linear layer; differentiable in its eight tensors.

    Operands: inp (*lead, H); norm weight and bias (H,), no bias for RMSNorm; fc1's weight (F, H), or (2F, H) for a
    gated activation, and bias; fc2's weight (H, F) and bias; a residual like inp or None, added in front of the norm;
    weights plain or quantized, biases may be None; ``args``, which is not modified: where the backward recomputes, its
    scales are copies. The result is (*lead, H) in the activation dtype; where ``args`` ask for the norm's output
    (*lead, H), or there is a residual, a tuple with that and with the sum (*lead, H).
    """

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Any:
        tensors, args = _Tensors(*operands[:-1]), operands[-1]
        fc1, fc2, plans = args.fc1, args.fc2, args.forward_plans
        if plans is None:
            how = args.norm, args.activation, args.return_layernorm_output
            forward = replay_of(_forward, [*tensors], (fc1, fc2), *how)
            out, beside, summed, saved = forward(tensors, args, tensors.fc1_weight.shape[0])
            recompute, to_save = None, saved.flat()
        else:
            first = replace(args, fc1=replace(fc1, plan=plans[0]), fc2=replace(fc2, plan=plans[1]))
            out, beside, summed, saved = _forward(tensors, first, tensors.fc1_weight.shape[0])
            recompute, to_save = _for_recomputation(tensors._replace(inp=summed, residual=None), args)
        ctx.save_for_backward(fc1.scales.scale_bwd, fc2.scales.scale_bwd, *to_save)
        ctx.backward_objects = LayerNormMLPBwdArgs(
            args.norm,
            args.activation,
            linear_bwd_args(fc1, tensors.fc1_weight, tensors.fc1_bias, saved.fc1_input, saved.fc1_weight),
            linear_bwd_args(fc2, tensors.fc2_weight, tensors.fc2_bias, saved.fc2_input, saved.fc2_weight),
            recompute,
            tensors.residual is not None,
        )
        out = out.detach()
        return (out, *(tensor.view_as(tensor) for tensor in beside)) if beside else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *beside: Tensor) -> Any:
        args: LayerNormMLPBwdArgs = ctx.backward_objects
        saved = list(saved_tensors(ctx))
        scales, saved = saved[:2], saved[2:]  # a star would leave a tuple to the compiler of PyTorch 2.11
        dy = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, grad_output.shape[-1])
        if args.recompute is not None:
            computed = _recompute(args, args.recompute, saved, dy)
            saved = computed.flat()
            fc1 = with_saved(args.fc1, computed.fc1_input, computed.fc1_weight)
            fc2 = with_saved(args.fc2, computed.fc2_input, computed.fc2_weight)
            args = replace(args, fc1=fc1, fc2=fc2)
            del computed
        how = args.norm, args.activation, args.with_residual, len(beside)
        backward = replay_of(_backward, [dy, *scales, *beside, *saved], (args.fc1, args.fc2), *how)
        return (*backward(args, saved, dy, beside, scales), None)
