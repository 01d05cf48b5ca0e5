"""The autograd function of a norm and the linear layer behind it.

The norm hands its output to the GEMM quantized; in high precision that output exists only where it is returned, or
where the backward is to read it. The rules of :mod:`.linear` hold here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..quantizers import NormSettings
from ..tensors import (
    QuantizedTensorStorage,
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
)
from .arguments import LinearBwdArgs, LinearFwdArgs, LinearNeeds, LinearSaved
from .linear import linear_backward, linear_setup_ctx
from .norm import norm_gradients
from .stages import fprop, normalize_operand, saved_operands, stage_weight, with_cached_weight


@dataclass(slots=True)
class LayerNormLinearTensors:
    """The operands; bound inside the boundary."""

    inp: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class LayerNormLinearFwdArgs:
    """Everything the forward reads. ``tensors`` is None until the boundary binds it to a copy.

    ``linear.needs.inp`` says whether the norm has a backward.
    """

    norm: NormSettings
    norm_needs: LinearNeeds
    linear: LinearFwdArgs
    return_layernorm_output: bool
    tensors: LayerNormLinearTensors | None = None


@dataclass(slots=True)
class LayerNormLinearBwdArgs:
    """Everything the backward reads besides saved tensors; never changed, so that it may run again."""

    norm: NormSettings
    norm_needs: LinearNeeds
    linear: LinearBwdArgs

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.linear.numerics.backward_override


def _forward_impl(
    args: LayerNormLinearFwdArgs,
) -> tuple[Tensor, Tensor | None, tuple[TensorOrQuantized | None, ...]]:
    """(output, norm output or None, what to save). Pure; reads only ``args``."""
    tensors, linear = args.tensors, args.linear
    assert tensors is not None
    x = tensors.inp.reshape(-1, tensors.inp.shape[-1])
    made = normalize_operand(
        x, tensors.norm_weight, tensors.norm_bias, args.norm, linear, args.return_layernorm_output
    )
    weight = stage_weight(linear, tensors.weight)
    assert weight is not None
    out_features = tensors.weight.shape[0]
    out = fprop(linear, made.operand, weight, tensors.bias, x.shape[0], out_features)
    normalized = None
    if args.return_layernorm_output and made.output is not None:
        normalized = made.output.view(tensors.inp.shape)
    saved = (
        tensors.inp if linear.needs.inp else None,
        tensors.norm_weight if linear.needs.inp else None,
        made.mean if linear.needs.inp else None,
        made.rstd if linear.needs.inp else None,
        *saved_operands(linear, made.operand, made.output, weight, tensors.weight),
    )
    return out.view(*tensors.inp.shape[:-1], out_features), normalized, saved


def _setup_ctx(args: LayerNormLinearFwdArgs) -> LayerNormLinearBwdArgs:
    tensors = args.tensors
    assert tensors is not None
    linear = linear_setup_ctx(args.linear.bind(tensors.weight, tensors.inp, tensors.bias))
    return LayerNormLinearBwdArgs(args.norm, args.norm_needs, linear)


class _LayerNormLinearFunction(torch.autograd.Function):
    """Boundary of :func:`layernorm_linear`: five operands in, five gradients out."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        fwd_args: LayerNormLinearFwdArgs,
    ) -> Any:
        args = replace(fwd_args, tensors=LayerNormLinearTensors(inp, norm_weight, norm_bias, weight, bias))
        out, normalized, tensors_to_save = _forward_impl(args)
        flat, objects = prepare_for_saving(*tensors_to_save)
        ctx.save_for_backward(*flat)
        ctx.tensor_objects = objects
        ctx.backward_objects = _setup_ctx(args)
        out = out.view_as(out)
        return out if normalized is None else (out, normalized.view_as(normalized))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *grad_normalized: Tensor) -> Any:
        saved: list[Any] = restore_from_func_ctx(ctx)
        inp, norm_weight, mean, rstd, operand, weight = saved
        args: LayerNormLinearBwdArgs = ctx.backward_objects
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        dw, grad, db = linear_backward(args.linear.bind(LinearSaved(operand, weight), dy))
        if grad is None:
            return None, None, None, dw, db, None
        if grad_normalized:
            grad = grad + grad_normalized[0].reshape(grad.shape)
        dx, dnorm_weight, dnorm_bias = norm_gradients(grad, inp, norm_weight, mean, rstd, args.norm)
        return dx, dnorm_weight, dnorm_bias, dw, db, None


def layernorm_linear(
    inp: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    args: LayerNormLinearFwdArgs,
) -> tuple[Tensor, Tensor | None, QuantizedTensorStorage | None]:
    """Norm, then a quantized linear layer; differentiable in its five tensors.

    Args:
        inp: (*lead, K). norm_weight, norm_bias: (K,); no bias for RMSNorm.
        weight: (N, K), plain or quantized. bias: (N,) or None.
        args: quantizers, state and options; not modified.
    Returns:
        (*lead, N) in the activation dtype; the norm's output (*lead, K) where ``args`` ask for it; and the freshly
        quantized weight when ``args.linear.caching`` asks for it.
    """
    linear, new_workspace = with_cached_weight(args.linear, weight)
    args = replace(args, linear=linear)
    if not args.linear.needs.any():
        tensors = LayerNormLinearTensors(inp, norm_weight, norm_bias, weight, bias)
        out, normalized, _ = _forward_impl(replace(args, tensors=tensors))
        return out, normalized, new_workspace
    result = _LayerNormLinearFunction.apply(inp, norm_weight, norm_bias, weight, bias, args)
    if isinstance(result, Tensor):
        return result, None, new_workspace
    return result[0], result[1], new_workspace
