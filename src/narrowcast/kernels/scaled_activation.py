"""Activations whose result is multiplied by one number per row: forward as other activations, row by row backward.

A backward program takes a few rows and walks along them: 256 lanes gather the sums for the scale's gradient in the
order of ``reference.reduction.row_sum``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from . import activation as activations
from .activation import (
    activate,
    activate_backward,
    activate_gated,
    activate_gated_backward,
    check_gradient,
    checked,
    in_float32,
    numbers,
)
from .codecs import product, round_to_dtype, to_float32
from .launch import Launcher, check_device
from .reduction import fold_lanes

LANES = 256
ROWS = 4


@triton.jit
def _scaled_activation_backward_kernel(
    x_ptr,
    grad_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    M,
    F,
    P0,
    P1,
    P2,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    P0, P1, P2 = in_float32(P0, P1, P2)
    first = tl.program_id(0).to(tl.int64) * ROWS
    index = tl.arange(0, ROWS)
    here = index < tl.minimum(M - first, ROWS).to(tl.int32)
    row = (first + index)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    scale = to_float32(tl.load(scale_ptr + first + index, mask=here, other=0.0))[:, None]
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    k = 0
    while k < F:
        column = k + lane
        inside = here[:, None] & (column < F)
        g = to_float32(tl.load(grad_ptr + row * F + column, mask=inside, other=0.0))
        if GATED:
            gate = row * (2 * F) + column
            a = to_float32(tl.load(x_ptr + gate, mask=inside, other=0.0))
            b = to_float32(tl.load(x_ptr + gate + F, mask=inside, other=0.0))
            y = activate_gated(a, b, KIND, P0, P1, P2)
            da, db = activate_gated_backward(g * scale, a, b, KIND, P0, P1, P2)
            tl.store(dx_ptr + gate, round_to_dtype(da, DTYPE), mask=inside)
            tl.store(dx_ptr + gate + F, round_to_dtype(db, DTYPE), mask=inside)
        else:
            a = to_float32(tl.load(x_ptr + row * F + column, mask=inside, other=0.0))
            y = activate(a, KIND)
            da = activate_backward(g * scale, a, KIND)
            tl.store(dx_ptr + row * F + column, round_to_dtype(da, DTYPE), mask=inside)
        lanes += product(g, y)
        k += LANES
    total = round_to_dtype(fold_lanes(lanes), dscale_ptr.dtype.element_ty)
    tl.store(dscale_ptr + first + index, total, mask=here)


_backward = Launcher(_scaled_activation_backward_kernel, num_warps=4)


def forward(x: Tensor, scale: Tensor, activation: str, **params: float) -> Tensor:
    """Compute ``reference.scaled_activation.forward``; ``x`` of any strides."""
    _check_scale(x, scale, activation)
    return activations.forward(x, activation, scale=scale.contiguous(), **params)


def backward(
    grad: Tensor, x: Tensor, scale: Tensor, activation: str, **params: float
) -> tuple[Tensor, Tensor]:
    """Compute ``reference.scaled_activation.backward``; the gradient of any strides."""
    gated = checked(x, activation, params).gated
    _check_scale(x, scale, activation)
    check_gradient(grad, x, activation)
    x, scale, grad = x.contiguous(), scale.contiguous(), grad.contiguous()
    F = x.shape[-1] // 2 if gated else x.shape[-1]
    dx, dscale = torch.empty_like(x), torch.empty_like(scale)
    rows = scale.numel()
    if rows:
        _backward(
            (cdiv(rows, ROWS), 1, 1),
            (x, grad, scale, dx, dscale, rows, F, *numbers(activation, params)),
            (activation, gated, ROWS, LANES),
        )
    return dx, dscale


def _check_scale(x: Tensor, scale: Tensor, activation: str) -> None:
    check_device(scale)
    if scale.shape != x.shape[:-1]:
        raise ValueError(
            f"the scale of {activation} has shape {tuple(scale.shape)}, expected one value per row, "
            f"{tuple(x.shape[:-1])}"
        )
    if scale.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"the scale of {activation} must be torch.bfloat16, torch.float16 or torch.float32, got {scale.dtype}; "
            "cast it first"
        )
