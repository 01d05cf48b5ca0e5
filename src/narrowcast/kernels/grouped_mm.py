"""Products of groups of rows in high precision, not rounded to the dtype of the operands.

The library's grouped GEMM writes its results in the dtype of its operands, and multiplies fp32 group by group, which
the host waits for. A weight gradient that is accumulated in fp32 would lose what it was accumulated for. Tiles of all
groups are taken one after the other; where a group starts is computed from the splits on the device, so nothing waits
for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from .codecs import operand, round_to_dtype
from .grouped_quantize import group_ends
from .launch import Launcher, check_device

TILE_M = 128


@triton.jit(do_not_specialize=["T", "groups"], do_not_specialize_on_alignment=["splits_ptr"])
def _grouped_mm_contraction_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    splits_ptr,
    T,
    M,
    N,
    groups,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if left_ptr.dtype.element_ty == tl.float32 else "tf32"
    group = tl.program_id(1)
    index = tl.arange(0, GROUPS)
    ends, _ = group_ends(splits_ptr, groups, 1, GROUPS)
    ends = tl.minimum(ends, T)
    start = tl.sum(tl.where(index == group - 1, ends, 0), axis=0)
    end = tl.sum(tl.where(index == group, ends, 0), axis=0)
    tile_rows = tl.cdiv(M, TILE_M)
    row = (tl.program_id(0) % tile_rows) * TILE_M + tl.arange(0, TILE_M)
    column = (tl.program_id(0) // tile_rows) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in tl.range(start, end, TILE_K):
        token = step + tl.arange(0, TILE_K)
        there = (token < end)[:, None]
        place = token.to(tl.int64)[:, None]
        a = tl.load(left_ptr + place * M + row[None, :], mask=there & (row < M)[None, :], other=0.0)
        b = tl.load(right_ptr + place * N + column[None, :], mask=there & (column < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(operand(a)), operand(b), total, input_precision=PRECISION)
    target = out_ptr + (group.to(tl.int64) * M + row)[:, None] * N + column[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(target, round_to_dtype(total, OUT), mask=inside)


@triton.jit(do_not_specialize=["T", "groups"], do_not_specialize_on_alignment=["splits_ptr"])
def _grouped_mm_rows_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    splits_ptr,
    T,
    N,
    K,
    groups,
    right_group,
    right_column,
    right_inner,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if left_ptr.dtype.element_ty == tl.float32 else "tf32"
    index = tl.arange(0, GROUPS)
    ends, _ = group_ends(splits_ptr, groups, 1, GROUPS)
    starts = ends - tl.load(splits_ptr + index, mask=index < groups, other=0).to(tl.int64)
    ends = tl.minimum(ends, T)
    tiles = tl.cumsum(tl.cdiv(tl.maximum(ends - starts, 0), TILE_M), axis=0)
    tile = tl.program_id(0)
    group = tl.sum((tiles <= tile).to(tl.int32), axis=0)
    if group >= groups:
        return
    end = tl.sum(tl.where(index == group, ends, 0), axis=0)
    before = tl.sum(tl.where(index == group - 1, tiles, 0), axis=0)
    start = tl.sum(tl.where(index == group, starts, 0), axis=0) + (tile - before) * TILE_M
    row = (start + tl.arange(0, TILE_M))[:, None]
    column = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N))[None, :]
    right = right_ptr + group.to(tl.int64) * right_group + column.to(tl.int64) * right_column
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in tl.range(0, K, TILE_K):
        inner = step + tl.arange(0, TILE_K)
        there = inner < K
        a = tl.load(left_ptr + row * K + inner[None, :], mask=(row < end) & there[None, :], other=0.0)
        b = tl.load(
            right + inner[:, None].to(tl.int64) * right_inner, mask=there[:, None] & (column < N), other=0.0
        )
        total = tl.dot(operand(a), operand(b), total, input_precision=PRECISION)
    tl.store(out_ptr + row * N + column, round_to_dtype(total, OUT), mask=(row < end) & (column < N))


_contraction = Launcher(_grouped_mm_contraction_kernel, num_warps=8, num_stages=3)
_rows = Launcher(_grouped_mm_rows_kernel, num_warps=8, num_stages=3)


def contraction(left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.grouped_mm.contraction`` of contiguous matrices; the host does not read ``splits``."""
    _check(left, right, right.dim() == 2 and right.is_contiguous() and right.shape[0] == left.shape[0])
    (T, M), N, groups = left.shape, right.shape[1], splits.shape[0]
    out = torch.empty((groups, M, N), dtype=dtype, device=left.device)
    if out.numel():
        tile_n, tile_k = _tile(left)
        _contraction(
            (cdiv(M, TILE_M) * cdiv(N, tile_n), groups, 1),
            (out, left, right, splits, T, M, N, groups),
            (triton.next_power_of_2(groups), TILE_M, tile_n, tile_k),
        )
    return out


def rows(left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.grouped_mm.rows``; rows of no group are undefined. The host does not read ``splits``."""
    _check(
        left, right, right.dim() == 3 and right.shape[:1] == splits.shape and right.shape[2] == left.shape[1]
    )
    (T, K), N, groups = left.shape, right.shape[1], splits.shape[0]
    out = torch.empty((T, N), dtype=dtype, device=left.device)
    if out.numel() and groups:
        tile_n, tile_k = _tile(left)
        _rows(
            (cdiv(T, TILE_M) + groups, cdiv(N, tile_n), 1),
            (out, left, right, splits, T, N, K, groups, *right.stride()),
            (triton.next_power_of_2(groups), TILE_M, tile_n, tile_k),
        )
    return out


def _tile(left: Tensor) -> tuple[int, int]:
    """Return TILE_N and TILE_K; tensor cores do not multiply fp32, and its factors need registers."""
    return (64, 32) if left.dtype == torch.float32 else (128, 64)


def _check(left: Tensor, right: Tensor, fits: bool) -> None:
    check_device(left)
    for name, data in (("left", left), ("right", right)):
        if data.dtype not in HIGH_PRECISION or data.dtype != left.dtype:
            raise ValueError(f"{name} is {data.dtype}; give one of {[*HIGH_PRECISION]} on both sides")
    if not fits or left.dim() != 2 or not left.is_contiguous():
        raise ValueError(
            f"left has shape {tuple(left.shape)} and strides {left.stride()}, right {tuple(right.shape)} and "
            f"{right.stride()}; give contiguous matrices of one length"
        )
