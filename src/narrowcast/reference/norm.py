"""LayerNorm and RMSNorm in two steps, statistics per row and then what is elementwise, forward and backward.

The split is what lets a quantize kernel compute the elementwise step on the way in. Everything is in fp32, each
operation rounded once, in the order written; sums have the order of ``reduction``.
"""

import math

import torch
from torch import Tensor

from .._checks import not_among
from .._device import HIGH_PRECISION
from .reduction import canonical_nan, column_sum, round_to_dtype, row_sum

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def statistics(
    x: Tensor, *, eps: float, normalization: str, residual: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return mean and reciprocal standard deviation of every row.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K).
        eps: added to the variance.
        normalization: "LayerNorm" or "RMSNorm", which takes the mean to be 0.
        residual: shape and dtype of ``x``, added to it first.

    Raises:
        ValueError: rank 0, an unknown normalization, or a residual of another shape or dtype.
        TypeError: another dtype.

    Numerics:
        ``(summed, mean, rstd)``: the sum with the residual, rounded to the dtype of ``x``, or None; fp32 (M,) or
        None for RMSNorm; fp32 (M,). ``mean = row_sum(x) / K``; ``rstd = 1 / sqrt(row_sum(d * d) / K + eps)`` with
        ``d = x - mean``, or ``x``.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {not_among(normalization, NORMALIZATIONS)}")
    values = _rows(x)
    summed = None
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"the residual is {residual.dtype} {tuple(residual.shape)}, expected {x.dtype} {tuple(x.shape)}"
            )
        summed = round_to_dtype(values + _rows(residual), x.dtype).view(x.shape)
        values = _rows(summed)
    mean = None
    if normalization == "LayerNorm":
        mean = canonical_nan(_mean(values, values.shape[1]))
        values = values - mean[:, None]
    # The fp32 square root of PyTorch is off by one ulp on some CPUs; through fp64 it is the nearest everywhere.
    deviation = (_mean(values * values, values.shape[1]) + eps).double().sqrt().float()
    return summed, mean, canonical_nan(torch.ones_like(deviation) / deviation)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool,
) -> Tensor:
    """Normalize with given statistics.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K).
        weight: (K,), one of these dtypes.
        bias: (K,), or None.
        mean: fp32 (M,), or None for RMSNorm.
        rstd: fp32 (M,).
        zero_centered_gamma: the factor is ``1 + weight``.

    Raises:
        ValueError: rank 0, or vectors of another length.
        TypeError: another dtype.

    Numerics:
        ``((x - mean) * rstd) * gamma + bias`` in fp32, rounded once to the dtype of ``x``.
    """
    values = _rows(x)
    _check_vectors(x, weight, bias, mean, rstd)
    y = _normalized(values, mean, rstd) * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.float()
    return round_to_dtype(y, x.dtype).view(x.shape)


def normalized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Normalize; the result and what :func:`statistics` returns.

    Args:
        x, eps, normalization, residual: as given to :func:`statistics`.
        weight: (K,), bf16, fp16 or fp32.
        bias: (K,), or None.
        zero_centered_gamma: the factor is ``1 + weight``.

    Raises:
        ValueError, TypeError: as :func:`statistics`.

    Numerics:
        ``(y, summed, mean, rstd)``: :func:`forward` with the statistics, y in shape and dtype of ``x``.
    """
    summed, mean, rstd = statistics(x, eps=eps, normalization=normalization, residual=residual)
    inner = x if summed is None else summed
    y = forward(inner, weight, bias, mean, rstd, zero_centered_gamma=zero_centered_gamma)
    return y, summed, mean, rstd


def gradient_statistics(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the sums that the gradients of a norm need.

    Args:
        grad: gradient of the result, shape of ``x``, one of its dtypes.
        x: as given to ``forward``; so are ``weight``, ``mean``, ``rstd`` and ``zero_centered_gamma``.
        dtype: of ``dweight`` and ``dbias``.

    Raises:
        ValueError: rank 0, or a gradient or vectors of another shape.
        TypeError: another dtype.

    Numerics:
        ``(c1, c2, dweight, dbias)`` in fp32, (M,), (M,), (K,), (K,), with ``xhat = (x - mean) * rstd`` and
        ``wdy = grad * gamma``: ``c1 = row_sum(xhat * wdy) / K``, ``c2 = row_sum(wdy) / K``, ``dweight =
        column_sum(grad * xhat)``, ``dbias = column_sum(grad)``, the last two rounded to ``dtype``. ``c2`` and ``dbias``
        are None for RMSNorm.
    """
    g, xhat, wdy = _gradient_terms(grad, x, weight, mean, rstd, zero_centered_gamma)
    c1 = canonical_nan(_mean(xhat * wdy, xhat.shape[1]))
    dweight = round_to_dtype(column_sum(g * xhat), dtype)
    if mean is None:
        return c1, None, dweight, None
    dbias = round_to_dtype(column_sum(g), dtype)
    return c1, canonical_nan(_mean(wdy, wdy.shape[1])), dweight, dbias


def backward(
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
    """Return the gradient of a norm with respect to its input.

    Args:
        grad: as given to ``gradient_statistics``; so are ``x`` to ``zero_centered_gamma``.
        c1: fp32 (M,), from ``gradient_statistics``; so is ``c2``.
        residual_grad: shape of ``x``; added, the gradient of the sum with the residual from elsewhere.

    Raises:
        ValueError: rank 0, or a gradient or vectors of another shape.
        TypeError: another dtype.

    Numerics:
        ``(wdy - xhat * c1) * rstd``, for LayerNorm ``(wdy - (xhat * c1 + c2)) * rstd``, plus ``residual_grad``, in
        fp32, rounded once to the dtype of ``x``.
    """
    _, xhat, wdy = _gradient_terms(grad, x, weight, mean, rstd, zero_centered_gamma)
    _check_vectors(x, weight, None, c2, c1)
    projection = xhat * c1[:, None]
    if c2 is not None:
        projection = projection + c2[:, None]
    dx = (wdy - projection) * rstd[:, None]
    if residual_grad is not None:
        _check_shape("residual_grad", residual_grad, x)
        dx = dx + _rows(residual_grad)
    return round_to_dtype(dx, x.dtype).view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """Return the matrix after a tensor, in fp32."""
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"norms take float32, bfloat16 or float16, got {x.dtype}; cast the input first")
    if x.dim() == 0:
        raise ValueError("norms need a last dim, got a tensor of rank 0")
    return x.detach().contiguous().view(math.prod(x.shape[:-1]), x.shape[-1]).float()


def _mean(values: Tensor, K: int) -> Tensor:
    total = row_sum(values)
    # A division by a Python number may become a multiplication by its reciprocal.
    return total / torch.full_like(total, K)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    gamma = weight.detach().float()
    return gamma + 1.0 if zero_centered else gamma


def _normalized(values: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (values if mean is None else values - mean[:, None]) * rstd[:, None]


def _gradient_terms(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the result in fp32, the normalized input, the gradient of the latter."""
    values = _rows(x)
    _check_shape("grad", grad, x)
    _check_vectors(x, weight, None, mean, rstd)
    g = _rows(grad)
    return g, _normalized(values, mean, rstd), g * _gamma(weight, zero_centered_gamma)


def _check_shape(name: str, actual: Tensor, x: Tensor) -> None:
    if actual.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(actual.shape)}, expected that of x, {tuple(x.shape)}")


def _check_vectors(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, second: Tensor
) -> None:
    for vector in (weight, bias):
        if vector is not None and tuple(vector.shape) != tuple(x.shape[-1:]):
            raise ValueError(
                f"the norm's weight and bias have shape {tuple(x.shape[-1:])}, got {tuple(vector.shape)}; in a layer "
                "that begins with a norm they are layer_norm_weight and layer_norm_bias"
            )
    rows = math.prod(x.shape[:-1])
    for vector in (first, second):
        if vector is not None and tuple(vector.shape) != (rows,):
            raise ValueError(f"statistics have one value per row, {(rows,)}, got {tuple(vector.shape)}")
