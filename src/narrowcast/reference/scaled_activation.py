"""Activations whose result is multiplied by one number per row, as the outputs of experts are by router weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .._activations import checked
from .._device import HIGH_PRECISION
from .activation import activated, check_gradient, gradient, widened
from .reduction import round_to_dtype, row_sum


def forward(x: Tensor, scale: Tensor, activation: str, **params: float) -> Tensor:
    """Apply an activation and multiply every row by its scale.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, F), or (*lead, 2F) for a gated one.
        scale: shape lead, any of these dtypes.
        activation: a name in ``ACTIVATIONS``.
        params: as ``activation.forward`` takes them.

    Raises:
        ValueError: as ``activation.checked``, or scales of another shape.
        TypeError: another dtype.

    Numerics:
        Shape (*lead, F), ``activation.activated(x) * scale`` in fp32, rounded once to the dtype of ``x``.
    """
    _check_scale(x, scale, activation)
    return round_to_dtype(activated(x, activation, **params) * _column(scale), x.dtype)


def backward(
    grad: Tensor, x: Tensor, scale: Tensor, activation: str, **params: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of ``forward`` with respect to ``x`` and ``scale``.

    Args:
        grad: fp32, bf16 or fp16, the gradient of the result, of its shape.
        x: as given to ``forward``; so are ``scale``, ``activation`` and ``params``.

    Raises:
        ValueError: as ``forward``, or ``grad`` has another shape.
        TypeError: another dtype.

    Numerics:
        ``(dx, dscale)``, each rounded once to the dtype of its operand: ``activation.gradient`` of ``grad * scale`` in
        fp32, and ``row_sum(grad * activation.activated(x))``, where a sum that is zero is +0.
    """
    _check_scale(x, scale, activation)
    check_gradient(grad, x, activation, params)
    g = widened(grad, activation)
    dscale = row_sum(g * activated(x, activation, **params))
    dx = gradient(g * _column(scale), x, activation, **params)
    return dx, round_to_dtype(dscale, scale.dtype)


def _check_scale(x: Tensor, scale: Tensor, activation: str) -> None:
    checked(activation, x.shape)
    if scale.shape != x.shape[:-1]:
        raise ValueError(
            f"the scale of {activation} has shape {tuple(scale.shape)}, expected one value per row, "
            f"{tuple(x.shape[:-1])}"
        )
    if scale.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"the scale of {activation} must be float32, bfloat16 or float16, got {scale.dtype}; cast it first"
        )


def _column(scale: Tensor) -> Tensor:
    return scale.detach().to(torch.float32, memory_format=torch.contiguous_format).unsqueeze(-1)
