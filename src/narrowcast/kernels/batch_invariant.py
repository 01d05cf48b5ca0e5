"""Products whose rows do not depend on each other: one tile size for every number of rows, and one order of sums.

A library's GEMM takes other tiles, and splits the contraction, where there are few rows. Here every program walks
along the whole contraction in steps of one size. The order of sums inside a step is the tensor cores'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from .codecs import to_float32
from .launch import INTERPRETING, Launcher, check_device

TILE_M = 64
TILE_N = 64
TILE_K = 64


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    scale_ptr,
    M,
    N,
    K,
    length,
    right_batch,
    right_row,
    right_column,
    scale_row,
    scale_column,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EMULATE: tl.constexpr,
):
    tile_columns = tl.cdiv(N, TILE_N)
    batch = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tile_columns).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = (tl.program_id(0) % tile_columns).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    left = left_ptr + (batch * M + row)[:, None] * K + inner[None, :]
    right = right_ptr + batch * right_batch + column[None, :] * right_column + inner[:, None] * right_row
    inside = (row < M)[:, None] & (column < N)[None, :]
    # The sums of parts that wait for their neighbor: of 1, 2 and 4 parts.
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    one = total
    two = total
    four = total
    for part in tl.static_range(SPLITS):
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for step in range(0, length, TILE_K):
            there = step + inner < length
            at = part * length + step
            a = tl.load(left + at, mask=(row < M)[:, None] & there[None, :], other=0.0)
            b = tl.load(right + at * right_row, mask=there[:, None] & (column < N)[None, :], other=0.0)
            if EMULATE:  # the interpreter multiplies bf16 as if it were integers
                a = to_float32(a, EMULATE)
                b = to_float32(b, EMULATE)
            total = tl.dot(a, b, total, input_precision="ieee")
        if SCALED:
            factor = scale_ptr + row[:, None] * scale_row + column[None, :] * scale_column
            total = total * tl.load(factor, mask=inside, other=0.0)
        if part % 2 == 0:
            one = total
        else:
            total = one + total
            if part % 4 == 1:
                two = total
            else:
                total = two + total
                if part % 8 == 3:
                    four = total
                else:
                    total = four + total
    tl.store(out_ptr + (batch * M + row)[:, None] * N + column[None, :], total, mask=inside)


_matmul = Launcher(_matmul_kernel, num_warps=4, num_stages=3)


def _product(
    left: Tensor,
    right: Tensor,
    strides: tuple[int, int, int],
    columns: int,
    splits: int,
    scale: Tensor | None = None,
) -> Tensor:
    """Return ``left @ right`` of matrices (batch, M, K) and (batch, K, N), the second with these strides."""
    check_device(left)
    for name, data in (("left", left), ("right", right)):
        if data.dtype not in HIGH_PRECISION or data.dtype != left.dtype:
            raise ValueError(f"{name} is {data.dtype}; give fp32, bf16 or fp16 on both sides")
    batch, M, K = left.shape
    out = torch.empty((batch, M, columns), dtype=torch.float32, device=left.device)
    if out.numel():
        factor = out if scale is None else scale.expand(M, columns)
        scale_strides = (0, 0) if scale is None else factor.stride()
        _matmul(
            (cdiv(M, TILE_M) * cdiv(columns, TILE_N), batch, 1),
            (out, left, right, factor, M, columns, K, K // splits, *strides, *scale_strides),
            (splits, scale is not None, TILE_M, TILE_N, TILE_K, INTERPRETING),
        )
    return out


def _matrices(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 2 else x.flatten(0, -3)


def matmul(left: Tensor, right: Tensor, splits: int = 1, scale: Tensor | None = None) -> Tensor:
    """Compute ``reference.batch_invariant.matmul`` in an order of its own, and of operands that are not rounded."""
    a, b = _matrices(left).contiguous(), _matrices(right)
    strides = b.stride(0), b.stride(2), b.stride(1)
    out = _product(a, b, strides, b.shape[1], splits, scale)
    return out.view(*left.shape[:-1], right.shape[-2])


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Compute ``reference.batch_invariant.mix`` in an order of its own, and of operands that are not rounded."""
    seen = (weights != 0).any(-2)[..., None]
    a, b = _matrices(weights).contiguous(), _matrices(torch.where(seen, values, 0.0).to(weights.dtype))
    out = _product(a, b, b.stride(), b.shape[2], 1)
    return out.view(*weights.shape[:-1], values.shape[-1])
