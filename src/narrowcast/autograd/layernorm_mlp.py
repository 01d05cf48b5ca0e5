"""The autograd function of a norm, a linear layer, an activation and a second linear layer: one boundary.

    forward    norm -> fc1 -> activation -> fc2; the norm and the activation hand over quantized operands
    backward   fc2 dgrad and wgrad -> activation backward, quantized, with fc1's bias gradient -> fc1 dgrad and wgrad
               -> norm backward

With ``checkpoint`` only the operands of the boundary are saved, and the backward computes the rest once more. The
rules of :mod:`.linear` hold here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import act, act_backward
from ..quantizers import (
    ActivationSettings,
    IdentityQuantizer,
    NormSettings,
    handle_of,
    quantize_activation,
    quantize_activation_gradient,
    quantize_operand,
)
from ..tensors import (
    QuantizedTensor,
    QuantizedTensorStorage,
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
    storage_of,
)
from .arguments import DelayedTensors, LinearBwdArgs, LinearFwdArgs, LinearNeeds, LinearSaved, LinearWgrad
from .linear import linear_backward, linear_setup_ctx
from .norm import norm_gradients
from .stages import (
    Gradients,
    Normalized,
    after,
    fprop,
    input_usage,
    normalize_operand,
    quantized_gradients,
    saved_operands,
    stage_weight,
    usage,
    with_cached_weight,
)


@dataclass(slots=True)
class LayerNormMLPTensors:
    """The operands; bound inside the boundary."""

    inp: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


@dataclass(slots=True)
class LayerNormMLPFwdArgs:
    """Everything the forward reads. ``tensors`` is None until the boundary binds it to a copy.

    ``fc1.needs.inp`` says whether the norm has a backward, ``fc2.needs.inp`` whether the activation has one.
    """

    norm: NormSettings
    norm_needs: LinearNeeds
    activation: ActivationSettings
    fc1: LinearFwdArgs
    fc2: LinearFwdArgs
    return_layernorm_output: bool
    checkpoint: bool
    tensors: LayerNormMLPTensors | None = None


@dataclass(slots=True)
class LayerNormMLPSaved:
    """What the backward reads of the forward; None what it does not need."""

    inp: Tensor | None
    norm_weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    fc1: LinearSaved
    fc1_out: Tensor | None
    fc2: LinearSaved

    def flat(self) -> tuple[TensorOrQuantized | None, ...]:
        """In the order of :meth:`of`."""
        return (
            self.inp,
            self.norm_weight,
            self.mean,
            self.rstd,
            self.fc1.inputmat,
            self.fc1.weight,
            self.fc1_out,
            self.fc2.inputmat,
            self.fc2.weight,
        )

    @staticmethod
    def of(flat: list[Any]) -> LayerNormMLPSaved:
        """Restored from :meth:`flat`."""
        inp, norm_weight, mean, rstd, fc1_input, fc1_weight, fc1_out, fc2_input, fc2_weight = flat
        fc1, fc2 = LinearSaved(fc1_input, fc1_weight), LinearSaved(fc2_input, fc2_weight)
        return LayerNormMLPSaved(inp, norm_weight, mean, rstd, fc1, fc1_out, fc2)


@dataclass(slots=True)
class LayerNormMLPBwdArgs:
    """Everything the backward reads besides saved tensors; never changed, so that it may run again.

    ``recompute``: the forward's arguments without tensors, when the backward is to compute it once more.
    """

    norm: NormSettings
    norm_needs: LinearNeeds
    activation: ActivationSettings
    fc1: LinearBwdArgs
    fc2: LinearBwdArgs
    recompute: LayerNormMLPFwdArgs | None

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.fc2.numerics.backward_override


@dataclass(slots=True)
class _Hidden:
    """Up to the output of fc1."""

    normalized: Normalized
    weight: QuantizedTensorStorage
    out: Tensor


@dataclass(slots=True)
class _Activated:
    """Operands of fc2: the quantized activation and weight, and the activation itself where the backward reads it."""

    operand: QuantizedTensorStorage | None
    output: Tensor | None
    weight: QuantizedTensorStorage | None


def _hidden(args: LayerNormMLPFwdArgs, tensors: LayerNormMLPTensors, features: int) -> _Hidden:
    x = tensors.inp.reshape(-1, tensors.inp.shape[-1])
    made = normalize_operand(
        x, tensors.norm_weight, tensors.norm_bias, args.norm, args.fc1, args.return_layernorm_output
    )
    weight = stage_weight(args.fc1, tensors.fc1_weight)
    assert weight is not None
    out = fprop(args.fc1, made.operand, weight, tensors.fc1_bias, x.shape[0], features)
    return _Hidden(made, weight, out)


def _activated(
    args: LayerNormMLPFwdArgs, tensors: LayerNormMLPTensors, hidden: Tensor, with_fprop: bool
) -> _Activated:
    fc2 = args.fc2
    weight = stage_weight(fc2, tensors.fc2_weight, with_fprop)
    handle, scale, amax = input_usage(fc2, with_fprop), fc2.delayed.scale_fwd, fc2.delayed.amax_fwd
    operand = output = None
    if fc2.needs.weight and fc2.numerics.backward_override == "high_precision":
        output = act(hidden, args.activation.activation, list(args.activation.parameters))
        if handle is not None:
            operand = quantize_operand(output, handle, scale, amax)
    elif handle is not None:
        operand = quantize_activation(hidden, args.activation, handle, scale, amax)
    return _Activated(operand, output, weight)


def _saved(
    args: LayerNormMLPFwdArgs, tensors: LayerNormMLPTensors, hidden: _Hidden, activated: _Activated
) -> LayerNormMLPSaved:
    made, keep_norm = hidden.normalized, args.fc1.needs.inp
    fc1 = saved_operands(args.fc1, made.operand, made.output, hidden.weight, tensors.fc1_weight)
    fc2 = saved_operands(args.fc2, activated.operand, activated.output, activated.weight, tensors.fc2_weight)
    return LayerNormMLPSaved(
        tensors.inp if keep_norm else None,
        tensors.norm_weight if keep_norm else None,
        made.mean if keep_norm else None,
        made.rstd if keep_norm else None,
        LinearSaved(*fc1),
        hidden.out if args.fc2.needs.inp else None,
        LinearSaved(*fc2),
    )


def _forward_impl(args: LayerNormMLPFwdArgs) -> tuple[Tensor, Tensor | None, LayerNormMLPSaved]:
    """(output, norm output or None, what the backward reads). Pure; reads only ``args``."""
    tensors = args.tensors
    assert tensors is not None
    hidden = _hidden(args, tensors, tensors.fc1_weight.shape[0])
    activated = _activated(args, tensors, hidden.out, True)
    assert activated.operand is not None and activated.weight is not None
    out_features = tensors.fc2_weight.shape[0]
    out = fprop(
        args.fc2, activated.operand, activated.weight, tensors.fc2_bias, hidden.out.shape[0], out_features
    )
    out = out.view(*tensors.inp.shape[:-1], out_features)
    normalized = hidden.normalized.output
    if not args.return_layernorm_output or normalized is None:
        return out, None, _saved(args, tensors, hidden, activated)
    return out, normalized.view(tensors.inp.shape), _saved(args, tensors, hidden, activated)


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(
    args: LayerNormMLPBwdArgs, saved: LayerNormMLPSaved, dy: Tensor, grad_normalized: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the seven operands, in their order. Drops from ``saved`` what was used, so that it can be freed."""
    dw2, d_act, db2 = linear_backward(args.fc2.bind(saved.fc2, dy))
    saved.fc2 = LinearSaved(None, None)
    if d_act is None:
        return None, None, None, None, None, dw2, db2
    dw1, grad, db1 = _fc1_backward(args, saved, d_act)
    if not args.norm_needs.any():
        return None, None, None, dw1, db1, dw2, db2
    assert grad is not None and saved.inp is not None and saved.norm_weight is not None
    assert saved.mean is not None and saved.rstd is not None
    if grad_normalized is not None:
        grad = grad + grad_normalized.reshape(grad.shape)
    norms = norm_gradients(grad, saved.inp, saved.norm_weight, saved.mean, saved.rstd, args.norm)
    return (*norms, dw1, db1, dw2, db2)


def _fc1_backward(args: LayerNormMLPBwdArgs, saved: LayerNormMLPSaved, d_act: Tensor) -> Gradients:
    """(wgrad, dgrad, grad_bias) of fc1 from the gradient of the activation."""
    fc1, fc1_out = args.fc1, saved.fc1_out
    saved.fc1_out = None
    assert fc1_out is not None
    handle = usage(fc1.grad_quantizers, fc1.needs.inp, fc1.needs.weight)
    if handle is None or fc1.numerics.backward_override is not None:
        parameters = list(args.activation.parameters)
        grad_hidden = act_backward(d_act, fc1_out, args.activation.activation, parameters)
        return linear_backward(fc1.bind(saved.fc1, grad_hidden))
    state = fc1.delayed
    grad, sums = quantize_activation_gradient(
        d_act, fc1_out, args.activation, handle, state.scale_bwd, state.amax_bwd, fc1.needs.bias
    )
    del fc1_out
    db1 = None if sums is None else sums.to(fc1.bias_dtype)
    return quantized_gradients(fc1, saved.fc1, grad, db1, d_act.shape[0])


# -- recomputation -----------------------------------------------------------------------------------------------------

_NO_NEEDS = LinearNeeds(inp=False, weight=False, bias=False)
_COPY = handle_of(IdentityQuantizer().with_usage(rowwise=True, columnwise=False))


def _forget(args: LayerNormMLPFwdArgs) -> LayerNormMLPFwdArgs:
    """Arguments of a forward that makes nothing for the backward."""
    return replace(args, fc1=replace(args.fc1, needs=_NO_NEEDS), fc2=replace(args.fc2, needs=_NO_NEEDS))


def _with_own_scales(args: LayerNormMLPFwdArgs) -> LayerNormMLPFwdArgs:
    """Arguments with a copy of the scales, which move between this forward and its backward if a step begins there."""
    return replace(args, fc1=_own_scale(args.fc1), fc2=_own_scale(args.fc2))


def _own_scale(args: LinearFwdArgs) -> LinearFwdArgs:
    scale = args.delayed.scale_fwd
    if scale is None:
        return args
    # an operator that the forward depends on: the compiler does not move it into the backward, as it may a clone
    (copied,) = quantize_operand(scale, _COPY).rowwise_operand()
    return replace(args, delayed=replace(args.delayed, scale_fwd=copied))


def _what_to_recompute_from(
    args: LayerNormMLPFwdArgs,
) -> tuple[LayerNormMLPFwdArgs, tuple[TensorOrQuantized | None, ...]]:
    """(arguments without tensors, tensors): the seven operands, the scales, and weights that are quantized already."""
    tensors = args.tensors
    assert tensors is not None
    fc1_weight, fc1_workspace = _weight_to_keep(args.fc1, tensors.fc1_weight)
    fc2_weight, fc2_workspace = _weight_to_keep(args.fc2, tensors.fc2_weight)
    kept = (
        tensors.inp,
        tensors.norm_weight,
        tensors.norm_bias,
        fc1_weight,
        tensors.fc1_bias,
        fc2_weight,
        tensors.fc2_bias,
        args.fc1.delayed.scale_fwd,
        args.fc2.delayed.scale_fwd,
        fc1_workspace,
        fc2_workspace,
    )
    stages = [
        replace(
            stage,
            delayed=DelayedTensors(),
            caching=replace(stage.caching, workspace=None),
            wgrad=LinearWgrad(),
        )
        for stage in (args.fc1, args.fc2)
    ]
    return replace(args, fc1=stages[0], fc2=stages[1], tensors=None), kept


def _weight_to_keep(
    args: LinearFwdArgs, weight: Tensor
) -> tuple[TensorOrQuantized, QuantizedTensorStorage | None]:
    """(weight, workspace); a quantized parameter is both, and kept once."""
    if isinstance(weight, QuantizedTensor):
        return storage_of(weight), None
    return weight, args.caching.workspace


def _recompute(args: LayerNormMLPFwdArgs, kept: list[Any], dy: Tensor, features: int) -> LayerNormMLPSaved:
    """What :func:`_forward_impl` would have saved, without the GEMM of fc2."""
    inp, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias = kept[:7]
    tensors = LayerNormMLPTensors(
        inp, after(dy, norm_weight), norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias
    )
    args = replace(
        args,
        fc1=_restored(args.fc1, kept[7], _workspace(fc1_weight, kept[9])),
        fc2=_restored(args.fc2, kept[8], _workspace(fc2_weight, kept[10])),
        return_layernorm_output=False,
    )
    hidden = _hidden(args, tensors, features)
    saved = _saved(args, tensors, hidden, _activated(args, tensors, hidden.out, False))
    return replace(saved, norm_weight=norm_weight if args.fc1.needs.inp else None)


def _workspace(
    weight: TensorOrQuantized, workspace: QuantizedTensorStorage | None
) -> QuantizedTensorStorage | None:
    return weight if isinstance(weight, QuantizedTensorStorage) else workspace


def _restored(
    args: LinearFwdArgs, scale: Tensor | None, workspace: QuantizedTensorStorage | None
) -> LinearFwdArgs:
    delayed = DelayedTensors()
    if scale is not None:  # the amax was collected by the first forward; this one's goes nowhere
        delayed = DelayedTensors(scale_fwd=scale, amax_fwd=torch.zeros_like(scale))
    return replace(args, delayed=delayed, caching=replace(args.caching, workspace=workspace))


# -- the boundary ------------------------------------------------------------------------------------------------------


class _LayerNormMLPFunction(torch.autograd.Function):
    """Boundary of :func:`layernorm_mlp`: seven operands in, seven gradients out."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        fwd_args: LayerNormMLPFwdArgs,
    ) -> Any:
        tensors = LayerNormMLPTensors(inp, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        args = replace(fwd_args, tensors=tensors)
        if args.checkpoint:
            args = _with_own_scales(args)
            out, normalized, _ = _forward_impl(_forget(args))
            recompute, tensors_to_save = _what_to_recompute_from(args)
        else:
            out, normalized, saved = _forward_impl(args)
            recompute, tensors_to_save = None, saved.flat()
        flat, objects = prepare_for_saving(*tensors_to_save)
        ctx.save_for_backward(*flat)
        ctx.tensor_objects = objects
        ctx.backward_objects = LayerNormMLPBwdArgs(
            args.norm,
            args.norm_needs,
            args.activation,
            linear_setup_ctx(args.fc1.bind(fc1_weight, inp, fc1_bias)),
            linear_setup_ctx(args.fc2.bind(fc2_weight, inp, fc2_bias)),
            recompute,
        )
        out = out.view_as(out)
        return out if normalized is None else (out, normalized.view_as(normalized))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *grad_normalized: Tensor) -> Any:
        restored = restore_from_func_ctx(ctx)
        args: LayerNormMLPBwdArgs = ctx.backward_objects
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        if args.recompute is None:
            saved = LayerNormMLPSaved.of(restored)
        else:
            saved = _recompute(args.recompute, restored, dy, args.fc1.out_features)
        del restored  # the backward drops what it has used from ``saved``
        gradients = _backward(args, saved, dy, grad_normalized[0] if grad_normalized else None)
        return (*gradients, None)


def layernorm_mlp(
    inp: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    args: LayerNormMLPFwdArgs,
) -> tuple[Tensor, Tensor | None, QuantizedTensorStorage | None, QuantizedTensorStorage | None]:
    """Norm, quantized linear layer, activation, quantized linear layer; differentiable in its seven tensors.

    Args:
        inp: (*lead, H). norm_weight, norm_bias: (H,); no bias for RMSNorm.
        fc1_weight: (F, H), or (2F, H) for a gated activation; plain or quantized. fc1_bias: its rows, or None.
        fc2_weight: (H, F), plain or quantized. fc2_bias: (H,) or None.
        args: quantizers, state and options; not modified.
    Returns:
        Always four: (*lead, H) in the activation dtype; the norm's output (*lead, H), and the freshly quantized weights
        of fc1 and fc2, each where ``args`` ask for it, else None.
    """
    fc1, new_fc1 = with_cached_weight(args.fc1, fc1_weight)
    fc2, new_fc2 = with_cached_weight(args.fc2, fc2_weight)
    args = replace(args, fc1=fc1, fc2=fc2)
    operands = (inp, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    if not args.fc2.needs.any():
        out, normalized, _ = _forward_impl(replace(args, tensors=LayerNormMLPTensors(*operands)))
        return out, normalized, new_fc1, new_fc2
    result = _LayerNormMLPFunction.apply(*operands, args)
    if isinstance(result, Tensor):
        return result, None, new_fc1, new_fc2
    return result[0], result[1], new_fc1, new_fc2
