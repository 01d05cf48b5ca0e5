"""LayerNorm and RMSNorm as differentiable functions, and as the producer of a GEMM's operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._tracing import refused_in_transform
from ..functional import draw_seed, norm, norm_backward, norm_quantize
from ..quantizers import OperandBuffers
from ..upstream.tensors import in_transform
from .arguments import LinearFwdArgs


@dataclass(frozen=True)
class NormSettings:
    """How to normalize. ``normalization``: "LayerNorm" or "RMSNorm"; ``zero_centered_gamma``: gamma is weight + 1."""

    normalization: str
    eps: float
    zero_centered_gamma: bool


class Normalized(NamedTuple):
    """A norm as a GEMM reads it, its statistics, and its output in high precision where that is returned or saved.

    ``operand``: None where the GEMM reads the rows of several processes, and these are gathered in high precision.
    ``summed``: the sum with the residual, empty without one.
    """

    operand: OperandBuffers | None
    output: Tensor | None
    mean: Tensor
    rstd: Tensor
    summed: Tensor


def normalized_operand(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: NormSettings,
    args: LinearFwdArgs,
    keep_output: bool,
) -> Normalized:
    """Norm of ``x`` (M, K) or ``x + residual`` as the input of a GEMM: in one step, unless its output is wanted."""
    plan, scale, amax = args.plan, args.scales.scale_fwd, args.scales.amax_fwd
    how = (settings.eps, settings.normalization, settings.zero_centered_gamma)
    if args.parallel is not None and args.parallel.gathers_input:
        parallel, joins = args.parallel, args.parallel.joins(plan.input, x.shape[0])
        if (
            keep_output
            or not joins
            or plan.input.shared is not None
            or plan.backward_override == "high_precision"
        ):
            output, mean, rstd, summed = norm(x, residual, weight, bias, *how)
            share = (
                parallel.share(output, plan.input, plan.input.seed(output), scale, amax) if joins else None
            )
            return Normalized(share, output, mean, rstd, summed)
        scale = parallel.shared_scale(plan.input, scale)
    if keep_output or (plan.needs_weight and plan.backward_override == "high_precision"):
        output, mean, rstd, summed = norm(x, residual, weight, bias, *how)
        return Normalized(plan.input.quantize(output, scale, amax), output, mean, rstd, summed)
    quantizer, seed = plan.input.quantizer, draw_seed(x) if plan.input.stochastic else None
    *buffers, mean, rstd, summed = norm_quantize(
        x, residual, weight, bias, *how, quantizer, seed, scale, amax
    )
    return Normalized(plan.input.split(buffers), None, mean, rstd, summed)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings) -> Tensor:
        out, mean, rstd, _ = norm(
            inp, None, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma
        )
        ctx.save_for_backward(inp, weight, mean, rstd)
        ctx.settings = settings
        return out.detach()  # no view, for operators in place that follow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        inp, weight, mean, rstd = ctx.saved_tensors
        return (*norm_gradients(grad_output, inp, weight, mean, rstd, ctx.settings), None)


def norm_gradients(
    grad: Tensor,
    inp: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    settings: NormSettings,
    residual_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias) of a norm; no dbias for RMSNorm.

    Args:
        grad: gradient of the output, as many elements as ``inp`` (*lead, K), which is what was normalized.
        weight, mean, rstd: as given to, and returned by, the forward.
        residual_grad: what else arrives at ``inp``, added to dx before its one rounding.
    """
    if inp.dim() != 2:
        grad = grad.reshape(inp.shape)
    dx, dweight, dbias = norm_backward(
        grad, inp, weight, mean, rstd, settings.zero_centered_gamma, residual_grad
    )
    return dx, dweight, dbias if settings.normalization == "LayerNorm" else None


def normalize(inp: Tensor, weight: Tensor, bias: Tensor | None, settings: NormSettings) -> Tensor:
    """Normalize over the last dim, differentiable in the three tensors; twice is a RuntimeError.

    Args:
        inp: (*lead, K), fp32, bf16 or fp16.
        weight, bias: (K,), of any of these dtypes; no bias for RMSNorm.
        settings: how to normalize.
    Returns:
        (*lead, K) in the dtype of ``inp``.
    """
    if not torch.compiler.is_compiling() and in_transform():
        raise refused_in_transform(settings.normalization, " or a norm of torch.nn")
    return _NormFunction.apply(inp, weight, bias, settings)
