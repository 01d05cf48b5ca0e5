"""Products with thin matrices, as the adapters of LoRA have them: the wide matrix is read once.

A library's GEMM with a thin side reads the wide matrix once for each of the two products that a backward takes of it,
and writes a product before it is added. Sums are in an order of their own: rows and columns of the wide matrix are
divided among the programs, and what each has summed is added in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import round_to_dtype, to_float32
from .launch import INTERPRETING, Launcher, check_device

ADD_ROWS = 64
ADD_COLUMNS = 128
ROWS = 128
COLUMNS = 64
PROGRAMS = 256
PARTS = 4
MIN_RANK = 16
MAX_RANK = 128


@triton.jit
def _operand(x, EMULATE: tl.constexpr):
    if EMULATE:  # the interpreter multiplies bf16 as if it were integers
        return to_float32(x, EMULATE)
    else:
        return x


@triton.jit
def _thin_add_kernel(
    base_ptr,
    left_ptr,
    right_ptr,
    out_ptr,
    M,
    N,
    rank,
    right_row,
    right_column,
    RANK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EMULATE: tl.constexpr,
):
    tiles = tl.cdiv(N, TILE_N)
    row = (tl.program_id(0) // tiles) * TILE_M + tl.arange(0, TILE_M)
    column = (tl.program_id(0) % tiles) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, RANK)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    base = tl.load(base_ptr + place, mask=inside, other=0.0)
    left = tl.load(
        left_ptr + row[:, None] * rank + inner[None, :],
        mask=(row < M)[:, None] & (inner < rank)[None, :],
        other=0.0,
    )
    right = tl.load(
        right_ptr + column[None, :] * right_row + inner[:, None] * right_column,
        mask=(column < N)[None, :] & (inner < rank)[:, None],
        other=0.0,
    )
    total = tl.dot(_operand(left, EMULATE), _operand(right, EMULATE))
    total = total + to_float32(base, EMULATE)
    tl.store(out_ptr + place, round_to_dtype(total, out_ptr.dtype.element_ty, EMULATE), mask=inside)


@triton.jit
def _thin_products_kernel(
    wide_ptr,
    right_ptr,
    left_ptr,
    rows_ptr,
    columns_ptr,
    M,
    N,
    rank,
    length,
    right_row,
    right_column,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # A program has PARTS tiles of rows and ``length`` columns.
    first = tl.program_id(0) * (PARTS * TILE_M)
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, N)
    row = tl.arange(0, TILE_M)
    inner = tl.arange(0, RANK)
    of_rank = inner < rank
    lefts = ()
    sums = ()
    for part in tl.static_range(PARTS):
        at = first + part * TILE_M + row
        if OF_COLUMNS:
            left = tl.load(
                left_ptr + at[:, None] * rank + inner[None, :],
                mask=(at < M)[:, None] & of_rank[None, :],
                other=0.0,
            )
            lefts = lefts + (_operand(left, EMULATE),)
        sums = sums + (tl.zeros([TILE_M, RANK], tl.float32),)
    for step in range(0, length, TILE_N):
        column = begin + step + tl.arange(0, TILE_N)
        if OF_ROWS:
            right = tl.load(
                right_ptr + column[:, None] * right_row + inner[None, :] * right_column,
                mask=(column < end)[:, None] & of_rank[None, :],
                other=0.0,
            )
            right = _operand(right, EMULATE)
        total = tl.zeros([TILE_N, RANK], tl.float32)
        new = ()
        for part in tl.static_range(PARTS):
            at = first + part * TILE_M + row
            wide = tl.load(
                wide_ptr + at.to(tl.int64)[:, None] * N + column[None, :],
                mask=(at < M)[:, None] & (column < end)[None, :],
                other=0.0,
            )
            wide = _operand(wide, EMULATE)
            if OF_ROWS:
                new = new + (tl.dot(wide, right, sums[part]),)
            if OF_COLUMNS:
                total = tl.dot(tl.trans(wide), lefts[part], total)
        if OF_ROWS:
            sums = new
        if OF_COLUMNS:
            tl.store(
                columns_ptr + (tl.program_id(0).to(tl.int64) * N + column)[:, None] * rank + inner[None, :],
                total,
                mask=(column < end)[:, None] & of_rank[None, :],
            )
    if OF_ROWS:
        for part in tl.static_range(PARTS):
            at = first + part * TILE_M + row
            tl.store(
                rows_ptr + (tl.program_id(1).to(tl.int64) * M + at)[:, None] * rank + inner[None, :],
                sums[part],
                mask=(at < M)[:, None] & of_rank[None, :],
            )


_add = Launcher(_thin_add_kernel, num_warps=4)
_products = Launcher(_thin_products_kernel, num_warps=4, num_stages=3)


def add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute ``reference.thin.add_product`` in an order of its own; ``right`` may have any strides."""
    check_device(base)
    (M, N), rank = base.shape, left.shape[1]
    out = torch.empty_like(base)
    if out.numel():
        _add(
            (cdiv(M, ADD_ROWS) * cdiv(N, ADD_COLUMNS), 1, 1),
            (base, left, right, out, M, N, rank, *right.stride()),
            (_padded(rank), ADD_ROWS, ADD_COLUMNS, INTERPRETING),
        )
    return out


def products(wide: Tensor, right: Tensor | None, left: Tensor | None) -> list[Tensor]:
    """Compute ``reference.thin.products`` in an order of its own; ``right`` may have any strides."""
    check_device(wide)
    (M, N), thin = wide.shape, right if left is None else left
    rank = thin.shape[1]  # type: ignore[union-attr]
    parts = 1 if left is None else PARTS
    tiles = cdiv(M, ROWS * parts)
    length = cdiv(cdiv(N, COLUMNS), max(1, PROGRAMS // max(tiles, 1))) * COLUMNS
    splits = cdiv(N, length)
    rows = wide.new_empty((splits, M, rank) if right is not None else (1, 1, 1), dtype=torch.float32)
    columns = wide.new_empty((tiles, N, rank) if left is not None else (1, 1, 1), dtype=torch.float32)
    if M and N:
        strides: Any = (0, 0) if right is None else right.stride()
        _products(
            (tiles, splits, 1),
            (
                wide, wide if right is None else right, wide if left is None else left, rows, columns,
                M, N, rank, length, *strides,
            ),
            (
                right is not None, left is not None, parts, _padded(rank), ROWS, COLUMNS, INTERPRETING,
            ),
        )  # fmt: skip
    made = [] if right is None else [rows.sum(0).to(wide.dtype)]
    return made if left is None else [*made, columns.sum(0)]


def _padded(rank: int) -> int:
    return max(MIN_RANK, triton.next_power_of_2(rank))
