"""Sources of the reference: what kernels compute on the way into a quantize kernel is simply computed here.

Functions and signatures are those of ``kernels.sources``; a source is a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import activation as _activation
from . import grouped as _grouped
from . import norm as _norm
from . import reduction


def tensor(x: Tensor, *, column_sums: bool = False) -> Tensor:
    """A tensor as it is."""
    return x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype."""
    return x.to(dtype)


def activation(x: Tensor, name: str, **parameters: float) -> Tensor:
    """``activation.forward``."""
    return _activation.forward(x, name, **parameters)


def activation_backward(
    grad: Tensor, x: Tensor, name: str, *, column_sums: bool = False, **parameters: float
) -> Tensor:
    """``activation.backward``."""
    return _activation.backward(grad, x, name, **parameters)


def normalized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
    wanted: str = "source",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """``norm.normalized``: (y, mean, rstd, sum)."""
    y, summed, mean, rstd = _norm.normalized(
        x,
        weight,
        bias,
        eps=eps,
        normalization=normalization,
        zero_centered_gamma=zero_centered_gamma,
        residual=residual,
    )
    return y, mean, rstd, summed


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    c1: Tensor,
    c2: Tensor | None,
    *,
    zero_centered_gamma: bool,
    residual_grad: Tensor | None = None,
) -> Tensor:
    """``norm.backward``."""
    return _norm.backward(
        grad,
        x,
        weight,
        mean,
        rstd,
        c1,
        c2,
        zero_centered_gamma=zero_centered_gamma,
        residual_grad=residual_grad,
    )


def rows_of_groups(x: Tensor, splits: Tensor, rows: int) -> Tensor:
    """``grouped.pad_rows`` to groups of whole 128 rows."""
    return _grouped.pad_rows(x, splits, 128, rows)[0]


def materialize(source: Tensor) -> Tensor:
    """The matrix as a tensor."""
    return source


def column_sum(source: Tensor) -> Tensor:
    """Sums over all but the last dim, fp32 (K,)."""
    return reduction.column_sum(source.reshape(-1, source.shape[-1]).float())
