"""LayerNorm and RMSNorm, alone and fused with the quantization of their result or of their gradient.

``narrowcast::norm*`` take ``normalization`` ("LayerNorm" or "RMSNorm") and, with ``residual``, normalize the sum
``x + residual`` rounded to the dtype of ``x``, which they return. What a call does not have - the mean of RMSNorm, the
sum without a residual - is returned as an empty tensor. Fused results equal the unfused ones, bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._producers import Producer, define_plain, define_quantizing


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _normalized(
    numerics: ModuleType,
    wanted: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the normalized matrix as a source, and (mean, rstd, sum)."""
    source, mean, rstd, summed = numerics.fused_producers.normalized(
        x,
        residual,
        weight,
        bias,
        eps=eps,
        normalization=normalization,
        zero_centered_gamma=zero_centered_gamma,
        wanted=wanted,
    )
    return source, (_or_empty(mean, rstd), rstd, _or_empty(summed, x))


def _statistics_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normalization: str,
    *_: Any,
) -> tuple[Tensor, ...]:
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = rstd.new_empty(rows if normalization == "LayerNorm" else 0)
    return mean, rstd, x.new_empty(0 if residual is None else x.shape)


_NORM = Producer(
    name="norm",
    inputs=(
        "Tensor x",
        "Tensor? residual",
        "Tensor weight",
        "Tensor? bias",
        "float eps",
        "str normalization",
        "bool zero_centered_gamma",
    ),
    like=0,
    source=_normalized,
    shape=lambda x, *_: tuple(x.shape),
    further=_statistics_fake,
    further_count=3,
)

norm = define_plain(_NORM)
"""Normalize over the last dim: (y, mean, rstd, sum); y and sum (*lead, K) in the dtype of ``x``, the others fp32."""

norm_quantize = define_quantizing(_NORM)
"""Normalize and quantize: the quantizer's buffers, then mean, rstd, sum; y itself reaches memory only if it must."""


def _gradient(
    numerics: ModuleType,
    wanted: str,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual_grad: Tensor | None,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the input gradient as a source, and (dweight, dbias)."""
    present = mean if mean.numel() == rstd.numel() else None
    c1, c2, dweight, dbias = numerics.norm.gradient_statistics(
        grad, x, weight, present, rstd, zero_centered_gamma=zero_centered_gamma, dtype=weight.dtype
    )
    source = numerics.fused_producers.norm_backward(
        grad,
        x,
        weight,
        present,
        rstd,
        c1,
        c2,
        zero_centered_gamma=zero_centered_gamma,
        residual_grad=residual_grad,
    )
    return source, (dweight, _or_empty(dbias, weight))


def _parameter_gradients_fake(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape if mean.shape == rstd.shape else 0)


_NORM_BACKWARD = Producer(
    name="norm_backward",
    inputs=(
        "Tensor grad",
        "Tensor x",
        "Tensor weight",
        "Tensor mean",
        "Tensor rstd",
        "bool zero_centered_gamma",
        "Tensor? residual_grad",
    ),
    like=1,
    source=_gradient,
    shape=lambda grad, x, *_: tuple(x.shape),
    further=_parameter_gradients_fake,
    further_count=2,
)

norm_backward = define_plain(_NORM_BACKWARD)
"""Gradients (dx, dweight, dbias) of :data:`norm`; ``residual_grad`` is added to dx before its one rounding.

``x``: what was normalized, that is the sum where there was a residual. ``mean``: empty for RMSNorm, whose dbias is
empty too.
"""

norm_backward_quantize = define_quantizing(_NORM_BACKWARD)
"""As :data:`norm_backward`, with dx quantized: the quantizer's buffers, then dweight and dbias."""
