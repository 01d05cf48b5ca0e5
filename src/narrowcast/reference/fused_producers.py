"""Fused producers of the reference: tensors computed at once, where kernels compute them while they load.

Functions and signatures are those of ``kernels.fused_producers``; a source is a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import activation as _activation
from . import cross_entropy as _cross_entropy
from . import norm as _norm
from . import reduction

activation = _activation.forward
norm_backward = _norm.backward


def tensor(x: Tensor, *, column_sums: bool = False) -> Tensor:
    """Return a tensor as it is."""
    return x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype."""
    return x.to(dtype)


def activation_backward(
    grad: Tensor, x: Tensor, name: str, *, column_sums: bool = False, **parameters: float
) -> Tensor:
    """Return ``activation.backward``."""
    return _activation.backward(grad, x, name, **parameters)


def cross_entropy_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    on_target: float,
    everywhere: float,
    *,
    column_sums: bool = False,
) -> Tensor:
    """Return ``cross_entropy.gradient``."""
    return _cross_entropy.gradient(logits, target, lse, grad, on_target, everywhere)


def normalized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    wanted: str = "source",
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return ``norm.normalized``: (y, mean, rstd, sum)."""
    y, summed, mean, rstd = _norm.normalized(x, weight, bias, residual=residual, **options)
    return y, mean, rstd, summed


def materialize(source: Tensor) -> Tensor:
    """Return the matrix as a tensor."""
    return source


def column_sum(source: Tensor) -> Tensor:
    """Return sums over all but the last dim, fp32 (K,)."""
    return reduction.column_sum(source.reshape(-1, source.shape[-1]).float())
