"""Products with thin matrices, as the adapters of LoRA have them: the wide matrix is read once.

A library's GEMM writes a product before it is added, and reads the wide matrix once for each of the two products that a
backward takes of it. One product of a wide matrix alone is as fast there. Sums are in an order of their own: rows and
columns of the wide matrix are divided among the programs, and what each has summed is added in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from ..upstream.cuda import current_stream
from .codecs import operand, round_to_dtype, to_float32
from .grouped_gemm import limits
from .launch import DescribedLaunch, Launcher, NotCompiledError, check_device, for_hopper

ADD_ROWS = 64
ADD_COLUMNS = 64
ROWS = 128
COLUMNS = 64
PARTS = 4
PROGRAMS = 256
MIN_RANK = 16
LARGEST_RANK = 64
"""Bounds of the rank of thin matrices that these kernels multiply; the library multiplies others."""
MOST_BASES = 4


@triton.jit
def _thin_add_kernel(
    base_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    left_ptr,
    right_ptr,
    out_ptr,
    M,
    N,
    rank,
    right_row,
    right_column,
    BASES: tl.constexpr,
    RANK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    tiles = tl.cdiv(N, TILE_N)
    row = (tl.program_id(0) // tiles) * TILE_M + tl.arange(0, TILE_M)
    column = (tl.program_id(0) % tiles) * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, RANK)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    base = to_float32(tl.load(base_ptr + place, mask=inside, other=0.0))
    if BASES > 1:
        base = base + to_float32(tl.load(second_ptr + place, mask=inside, other=0.0))
    if BASES > 2:
        base = base + to_float32(tl.load(third_ptr + place, mask=inside, other=0.0))
    if BASES > 3:
        base = base + to_float32(tl.load(fourth_ptr + place, mask=inside, other=0.0))
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
    total = tl.dot(operand(left), operand(right)) + base
    tl.store(out_ptr + place, round_to_dtype(total, out_ptr.dtype.element_ty), mask=inside)


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
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
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
        left = tl.load(
            left_ptr + at[:, None] * rank + inner[None, :],
            mask=(at < M)[:, None] & of_rank[None, :],
            other=0.0,
        )
        lefts = lefts + (operand(left),)
        sums = sums + (tl.zeros([TILE_M, RANK], tl.float32),)
    for step in range(0, length, TILE_N):
        column = begin + step + tl.arange(0, TILE_N)
        right = tl.load(
            right_ptr + column[:, None] * right_row + inner[None, :] * right_column,
            mask=(column < end)[:, None] & of_rank[None, :],
            other=0.0,
        )
        right = operand(right)
        total = tl.zeros([TILE_N, RANK], tl.float32)
        new = ()
        for part in tl.static_range(PARTS):
            at = first + part * TILE_M + row
            wide = tl.load(
                wide_ptr + at.to(tl.int64)[:, None] * N + column[None, :],
                mask=(at < M)[:, None] & (column < end)[None, :],
                other=0.0,
            )
            wide = operand(wide)
            new = new + (tl.dot(wide, right, sums[part]),)
            total = tl.dot(tl.trans(wide), lefts[part], total)
        sums = new
        tl.store(
            columns_ptr + (tl.program_id(0).to(tl.int64) * N + column)[:, None] * rank + inner[None, :],
            total,
            mask=(column < end)[:, None] & of_rank[None, :],
        )
    for part in tl.static_range(PARTS):
        at = first + part * TILE_M + row
        tl.store(
            rows_ptr + (tl.program_id(1).to(tl.int64) * M + at)[:, None] * rank + inner[None, :],
            sums[part],
            mask=(at < M)[:, None] & of_rank[None, :],
        )


_add = Launcher(_thin_add_kernel, num_warps=4)
_products = Launcher(_thin_products_kernel, num_warps=4, num_stages=3)
_products_in_little = Launcher(_thin_products_kernel, num_warps=4, num_stages=2)


def add_product(bases: Sequence[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Compute ``reference.low_rank_products.add_product`` of contiguous tensors; ``right`` may have any strides."""
    base = bases[0]
    check_device(base)
    (M, N), rank = base.shape, left.shape[1]
    out = torch.empty_like(base)
    if rank > LARGEST_RANK:
        bases = [*bases, left.to(base.dtype) @ right.t().to(base.dtype)]
        left, right, rank = left.new_zeros(M, 1), right[:, :1], 1
    for more in bases[MOST_BASES:]:
        bases = [bases[0] + more, *bases[1:MOST_BASES]]
    if out.numel():
        given = [*bases, *[base] * (MOST_BASES - len(bases))]
        _add(
            (cdiv(M, ADD_ROWS) * cdiv(N, ADD_COLUMNS), 1, 1),
            (*given, left, right, out, M, N, rank, *right.stride()),
            (len(bases), _padded(rank), ADD_ROWS, ADD_COLUMNS),
        )
    return out


def products(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    """Compute ``reference.low_rank_products.products`` in an order of its own; ``right`` may have any strides."""
    check_device(wide)
    (M, N), rank = wide.shape, right.shape[1]
    if rank > LARGEST_RANK:
        return [wide @ right, (wide.t() @ left).float()]
    parts, launcher = PARTS, _products
    if not limits(wide.device)[1] or rank > 2 * MIN_RANK:
        parts, launcher = 1, _products_in_little
    tiles = cdiv(M, ROWS * parts)
    length = cdiv(cdiv(N, COLUMNS), max(1, PROGRAMS // max(tiles, 1))) * COLUMNS
    rows = wide.new_empty((cdiv(N, length), M, rank), dtype=torch.float32)
    columns = wide.new_empty((tiles, N, rank), dtype=torch.float32)
    if M and N:
        launcher(
            (tiles, rows.shape[0], 1),
            (wide, right, left, rows, columns, M, N, rank, length, *right.stride()),
            (parts, _padded(rank), ROWS, COLUMNS),
        )
    return [rows.sum(0).to(wide.dtype), columns.sum(0)]


def has_gemm(device: torch.device) -> bool:
    """Return whether :func:`gemm` multiplies on this device."""
    return for_hopper("grouped_hopper", device) is not None


def gemm(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    thin_left: Tensor,
    thin_right: Tensor,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor | None:
    """Return ``left @ right.T + thin_left @ thin_right.T``; None if no kernel here multiplies these.

    Args:
        left, right: FP8 codes (M, K) and (N, K), with a scale each, fp32 of one element.
        thin_left: (M, r), thin_right: (N, r), of any strides; bf16 or fp16.
        dtype: of the result.
    """
    device, rank = left.device, thin_left.shape[1]
    key = (
        device, left.dtype, left.shape, left.stride(), right.dtype, right.shape, right.stride(), thin_left.dtype,
        thin_right.dtype, rank, dtype, fast_accumulation,
    )  # fmt: skip
    launch, hopper = _LAUNCHES.get(key), for_hopper("grouped_hopper", device)
    if launch is None:
        fits = thin_left.dtype == thin_right.dtype == dtype and rank <= LARGEST_RANK
        if hopper is None or not fits or dtype not in (torch.bfloat16, torch.float16) or left.shape[1] % 16:
            return None
    rows, columns = left.shape[0], right.shape[0]
    out = torch.empty((rows, columns), dtype=dtype, device=device)
    thin = thin_left.contiguous(), thin_right.contiguous()
    size = _size_of_all(rows, device)
    if launch is not None and launch([out, left, left_scale, right, right_scale, size, *thin]):
        return out
    if not hopper.takes(left, right[None], right_scale, columns, 1, None):
        return None
    tensors = [out, left, left_scale.view(1), right[None], right_scale.view(1), size, *thin]
    programs, _ = limits(device)
    try:
        if launch is None:
            if len(_LAUNCHES) >= MOST_LAUNCHES:
                _LAUNCHES.clear()
            given = hopper.launch_of(*tensors[:6], None, 1, programs, fast_accumulation, thin)
            _LAUNCHES[key] = DescribedLaunch(hopper.grouped, *given, tensors)
        else:
            hopper.multiply(*tensors[:6], None, 1, programs, fast_accumulation, thin)
    except NotCompiledError:
        return None
    return out


_LAUNCHES: dict[Any, DescribedLaunch] = {}
"""Launches of :func:`gemm`, by everything that they depend on except addresses."""
MOST_LAUNCHES = 1024
_SIZES: dict[Any, Tensor] = {}


def _size_of_all(rows: int, device: torch.device) -> Tensor:
    """Return the size of a group of all rows, int32 (1,), written once and kept unless a graph is captured."""
    key = rows, device, current_stream(device.index)
    size = _SIZES.get(key)
    if size is None:
        size = torch.full((1,), rows, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            if len(_SIZES) >= MOST_LAUNCHES:
                _SIZES.clear()
            _SIZES[key] = size
    return size


def _padded(rank: int) -> int:
    return max(MIN_RANK, triton.next_power_of_2(rank))
