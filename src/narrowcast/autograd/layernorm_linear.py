"""The autograd function of a norm and the linear layer behind it.

The norm hands its output to the GEMM quantized; in high precision that output exists only where it is returned, or
where the backward is to read it. The rules of :mod:`.gemms` hold here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import replay_of
from .arguments import LinearBwdArgs, LinearFwdArgs
from .gemms import (
    SavedOperand,
    fprop,
    linear_backward,
    linear_bwd_args,
    saved_operand,
    split_operand,
    weight_operand,
)
from .linear import saved_tensors
from .norm import NormSettings, norm_gradients, normalized_operand


@dataclass(slots=True)
class LayerNormLinearFwdArgs:
    """What the forward reads besides its tensors. ``linear.plan.needs_input``: the norm has a backward."""

    norm: NormSettings
    linear: LinearFwdArgs
    return_layernorm_output: bool
    return_input: bool


def _forward(
    inp: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    args: LayerNormLinearFwdArgs,
) -> tuple[Tensor, Tensor | None, list[Tensor | None], SavedOperand, SavedOperand]:
    """(output, norm output or None; to save: tensors of the norm, input and weight of the GEMM)."""
    linear, plan = args.linear, args.linear.plan
    x = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
    normalized = normalized_operand(
        x, None, norm_weight, norm_bias, args.norm, linear, args.return_layernorm_output
    )
    w, saved_weight = weight_operand(weight, linear)
    operand, rows, lead, override = normalized.operand, x.shape[0], inp.shape[:-1], plan.backward_override
    if linear.parallel is None:
        saved_input = saved_operand(operand, normalized.output, plan.needs_weight, override)  # type: ignore[arg-type]
    else:
        operand, saved_input, rows = split_operand(linear, linear.parallel, operand, normalized.output, rows)
        lead = torch.Size((-1, *lead[1:])) if linear.parallel.gathers_input else lead
    out = fprop(linear, operand, w, bias, rows, weight.shape[0])  # type: ignore[arg-type]
    output = None
    if args.return_layernorm_output and normalized.output is not None:
        output = normalized.output.view(inp.shape)
    of_norm: list[Tensor | None] = [None, None, None, None]
    if plan.needs_input:
        of_norm = [inp, norm_weight, normalized.mean, normalized.rstd]
    if len(lead) != 1:
        out = out.view(*lead, weight.shape[0])
    return out, output, of_norm, saved_input, saved_weight


def _backward(
    args: LinearBwdArgs,
    norm: NormSettings,
    returned_input: bool,
    saved: list[Any],
    dy: Tensor,
    beside: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the five operands, in their order; ``beside``: of what was returned beside the output."""
    inp, norm_weight, mean, rstd, scale_bwd, *saved = saved
    count = args.saved_input[0]
    dw, grad, db = linear_backward(args, dy, saved[:count], saved[count:], scale_bwd)
    grad_normalized, grad_input = (beside[:-1], beside[-1]) if returned_input else (beside, None)
    if grad is None:
        return None, None, None, dw, db
    if grad_normalized:
        grad = grad + grad_normalized[0].reshape(grad.shape)
    return *norm_gradients(grad, inp, norm_weight, mean, rstd, norm, grad_input), dw, db


class LayerNormLinearFunction(torch.autograd.Function):
    """Norm, then a quantized linear layer; differentiable in its five tensors.

    Operands: inp (*lead, K); norm weight and bias (K,), no bias for RMSNorm; weight (N, K), plain or quantized; bias
    (N,) or None; ``args``, which is not modified. The result is (*lead, N) in the activation dtype, where ``args`` ask
    for them in a tuple with the norm's output (*lead, K) and the input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        args: LayerNormLinearFwdArgs,
    ) -> Any:
        operands = [inp, norm_weight, norm_bias, weight, bias]
        forward = replay_of(_forward, operands, (args.linear,), args.norm, args.return_layernorm_output)
        out, normalized, of_norm, saved_input, saved_weight = forward(
            inp, norm_weight, norm_bias, weight, bias, args
        )
        linear = linear_bwd_args(args.linear, weight, bias, saved_input, saved_weight)
        ctx.save_for_backward(
            *of_norm, args.linear.scales.scale_bwd, *saved_input.tensors, *saved_weight.tensors
        )
        ctx.backward_objects, ctx.norm, ctx.returned_input = linear, args.norm, args.return_input
        out = out.detach()
        beside = ([] if normalized is None else [normalized]) + ([inp] if args.return_input else [])
        return (out, *(tensor.view_as(tensor) for tensor in beside)) if beside else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *beside: Tensor) -> Any:
        args: LinearBwdArgs = ctx.backward_objects
        saved, how = list(saved_tensors(ctx)), (ctx.norm, ctx.returned_input)
        dy = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, grad_output.shape[-1])
        backward = replay_of(_backward, [dy, *beside, *saved], (args,), *how, len(beside))
        return (*backward(args, *how, saved, dy, beside), None)
