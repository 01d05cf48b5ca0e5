"""LayerNorm and RMSNorm as differentiable functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable, refuse_in_transform
from ..functional import norm, norm_backward
from ..upstream.tensors import in_transform


@dataclass(frozen=True)
class NormSettings:
    """Settings of a norm. ``normalization``: "LayerNorm" or "RMSNorm"; ``zero_centered_gamma``: gamma is weight + 1."""

    normalization: str
    eps: float
    zero_centered_gamma: bool


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
    """Return (dx, dweight, dbias) of a norm; no dbias for RMSNorm.

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
    if in_transform():
        refuse_in_transform(settings.normalization, " or a norm of torch.nn", plans_backward=False)
    return _NormFunction.apply(inp, weight, bias, settings)
