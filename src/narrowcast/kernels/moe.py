"""Tokens to their experts and back: one launch copies, another adds up, and a third goes backward through the sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from . import block_scaled_rows
from .codecs import decode_fp8, product, round_to_dtype, to_float32
from .grouped_padding import BYTES, ROWS, raw
from .launch import Launcher, check_device
from .reduction import fold_lanes
from .scaling import scales_of_rows

COLUMNS = 1024
ENTRIES = 1024
LANES = 256
GRADIENT_ROWS = 4


@triton.jit(do_not_specialize=["rows", "columns"])
def _moe_spread_kernel(
    x_ptr, positions_ptr, out_ptr, rows, columns, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.load(positions_ptr + row, mask=row < rows, other=-1)[:, None]
    token = (position // columns).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x_ptr + token * K + column, mask=(position >= 0) & (column < K), other=0)
    tl.store(out_ptr + row[:, None] * K + column, values, mask=(row < rows)[:, None] & (column < K))


@triton.jit(do_not_specialize=["entries", "rows"])
def _moe_positions_kernel(row_map_ptr, out_ptr, entries, rows, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_map_ptr + entry, mask=entry < entries, other=-1)
    tl.store(out_ptr + row, entry, mask=(row >= 0) & (row < rows))


@triton.jit
def _load_rows(
    rows_ptr, scale_ptr, row, start, K, inside, E5M2: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return rows [R] from column ``start`` on as fp32 [R, COLUMNS]; of codes, with ``BLOCK``, what they decode to."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    source = rows_ptr + row[:, None] * K + column
    mask = inside[:, None] & (column < K)
    if BLOCK == 0:
        return to_float32(tl.load(source, mask=mask, other=0.0))
    else:
        scale = scales_of_rows(scale_ptr, row, start, K, inside, BLOCK, COLUMNS)
        value = decode_fp8(tl.load(source, mask=mask, other=0), E5M2) * scale
        return to_float32(round_to_dtype(value, DTYPE))


@triton.jit(do_not_specialize=["columns"])
def _moe_collect_kernel(
    rows_ptr,
    scale_ptr,
    row_map_ptr,
    weights_ptr,
    out_ptr,
    columns,
    K,
    WEIGHTED: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    one = tl.arange(0, 1)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for column in range(columns):
        row = tl.load(row_map_ptr + token * columns + column).to(tl.int64)
        if row >= 0:
            values = _load_rows(rows_ptr, scale_ptr, row + one, start, K, one == 0, E5M2, BLOCK, COLUMNS, OUT)
            if WEIGHTED:
                weight = tl.load(weights_ptr + token * columns + column) + tl.zeros([1, COLUMNS], tl.float32)
                total += product(weight, values)
            else:
                total += values
    k = start + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + token * K + k, round_to_dtype(total, OUT), mask=k < K)


@triton.jit(do_not_specialize=["rows", "columns"])
def _moe_collect_backward_kernel(
    grad_ptr,
    rows_ptr,
    scale_ptr,
    positions_ptr,
    weights_ptr,
    drows_ptr,
    sums_ptr,
    rows,
    columns,
    K,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    DTYPE: tl.constexpr = drows_ptr.dtype.element_ty
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = index < rows
    position = tl.load(positions_ptr + index, mask=here, other=-1)
    known = position >= 0
    weight = tl.load(weights_ptr + position, mask=known, other=0.0)[:, None]
    token = (position // columns).to(tl.int64)[:, None]
    row = index[:, None]
    lane = tl.arange(0, LANES)[None, :]
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    k = 0
    while k < K:
        column = k + lane
        inside = known[:, None] & (column < K)
        g = to_float32(tl.load(grad_ptr + token * K + column, mask=inside, other=0.0))
        value = _load_rows(rows_ptr, scale_ptr, index, k, K, known, E5M2, BLOCK, LANES, DTYPE)
        drow = tl.where(inside, round_to_dtype(g * weight, DTYPE), 0.0)
        tl.store(drows_ptr + row * K + column, drow.to(DTYPE), mask=here[:, None] & (column < K))
        lanes += product(g, value)
        k += LANES
    # a sum that is zero is +0
    total = tl.where(known, round_to_dtype(fold_lanes(lanes) + 0.0, tl.float32), 0.0)
    tl.store(sums_ptr + index, total, mask=here)


_spread = Launcher(_moe_spread_kernel, num_warps=4)
_positions = Launcher(_moe_positions_kernel, num_warps=4)
_collect = Launcher(_moe_collect_kernel, num_warps=4)
_collect_backward = Launcher(_moe_collect_backward_kernel, num_warps=4)


def spread(x: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Compute ``reference.moe.spread``; ``x`` of a dtype of 1, 2 or 4 bytes.

    Raises:
        ValueError: a dtype of another size.
    """
    source, positions = raw(x), positions.contiguous()
    rows, K = positions.shape[0], x.shape[1]
    out = source.new_empty((rows, K))
    if out.numel():
        width = BYTES // x.element_size()
        _spread(
            (cdiv(rows, ROWS), cdiv(K, width), 1), (source, positions, out, rows, columns, K), (ROWS, width)
        )
    return out.view(x.dtype)


def positions(row_map: Tensor, rows: int) -> Tensor:
    """Compute ``reference.moe.positions``."""
    check_device(row_map)
    row_map = row_map.contiguous()
    out = torch.full((rows,), -1, dtype=torch.int32, device=row_map.device)
    entries = row_map.numel()
    if entries and rows:
        _positions((cdiv(entries, ENTRIES), 1, 1), (row_map, out, entries, rows), (ENTRIES,))
    return out


def collect(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Compute ``reference.moe.collect``."""
    return _sum(rows, None, row_map, weights, rows.dtype)


def collect_coded(
    codes: Tensor, scales: Tensor, e5m2: bool, row_map: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute ``reference.moe.collect_coded``."""
    return _sum(codes, scales, row_map, weights, dtype, e5m2)


def _sum(
    rows: Tensor,
    scales: Tensor | None,
    row_map: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype,
    e5m2: bool = False,
) -> Tensor:
    rows, scales, block = _readable(rows, scales)
    row_map = row_map.contiguous()
    (tokens, columns), K = row_map.shape, rows.shape[1]
    out = torch.empty((tokens, K), dtype=dtype, device=rows.device)
    if out.numel():
        weighted = weights is not None
        _collect(
            (tokens, cdiv(K, COLUMNS), 1),
            (rows, scales, row_map, weights.contiguous() if weighted else row_map, out, columns, K),
            (weighted, e5m2, block, COLUMNS),
        )
    return out


def collect_backward(
    grad: Tensor,
    rows: Tensor,
    positions: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
    e5m2: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference.moe.collect_backward``."""
    dtype = rows.dtype if scales is None else grad.dtype
    rows, scales, block = _readable(rows, scales)
    grad, positions, weights = (t.contiguous() for t in (grad, positions, weights))
    R, K = rows.shape
    drows = torch.empty((R, K), dtype=dtype, device=rows.device)
    sums = torch.empty(R, dtype=torch.float32, device=rows.device)
    if R:
        _collect_backward(
            (cdiv(R, GRADIENT_ROWS), 1, 1),
            (grad, rows, scales, positions, weights, drows, sums, R, weights.shape[1], K),
            (e5m2, block, GRADIENT_ROWS, LANES),
        )
    return drows, sums


def _readable(rows: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return rows, or codes, and scales as the kernels read them, and how many codes share one, 0 for rows."""
    if scales is not None:
        return block_scaled_rows.checked(rows, scales)
    check_device(rows)
    if rows.dtype not in HIGH_PRECISION:
        raise ValueError(f"cannot add up rows of {rows.dtype}; use bfloat16, float16 or float32")
    rows = rows.contiguous()
    return rows, rows, 0
