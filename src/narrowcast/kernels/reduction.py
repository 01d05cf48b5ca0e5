"""Sums in the fixed order of ``reference.reduction``: pairs of adjacent rows or lanes, until one is left.

A reduction over an axis of size two has one possible result, so a chain of them fixes the order whatever the layout.
A subtree may be summed anywhere: kernels leave the sums of 16 rows each as partials, which shuffles within a warp can
make, and ``column_sum`` adds those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import round_to_dtype, to_float32
from .launch import TENSOR, Launch, Launcher, beside, check_device, remembered

PARTIAL_ROWS = 16
FOLDED_ROWS = 128
FOLD_COLUMNS = 64
RANKS_BLOCK = 16384
# Beside GEMMs, which are as slow as the last of their programs to find a processor, so many reach a good part of the
# memory's bandwidth and leave the other processors free. Without GEMMs the next transfer still needs some.
RANKS_PROGRAMS_BESIDE = 48
RANKS_PROGRAMS_ALONE = 112


@triton.jit
def fold_pairs(v):
    """Add adjacent rows: [R, C] -> [R / 2, C]."""
    return tl.sum(tl.reshape(v, [v.shape[0] // 2, 2, v.shape[1]]), axis=1)


@triton.jit
def fold_rows(v):
    """Add adjacent rows until one is left: [R, C] -> [C], R a power of two."""
    if v.shape[0] == 1:
        return tl.reshape(v, [v.shape[1]])
    else:
        return fold_rows(fold_pairs(v))


@triton.jit
def fold_lanes(v):
    """Add adjacent columns until one is left: [R, C] -> [R], C a power of two."""
    if v.shape[1] == 1:
        return tl.reshape(v, [v.shape[0]])
    else:
        return fold_lanes(tl.sum(tl.reshape(v, [v.shape[0], v.shape[1] // 2, 2]), axis=2))


@triton.jit
def _reduction_fold_kernel(x_ptr, sums_ptr, M, K, column_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) - tile * column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    first = tile.to(tl.int64) * ROWS
    # Rows 8 * i + j of one column meet in one thread, so three of the seven levels stay in registers.
    row = tl.arange(0, ROWS // 8)[:, None] * 8
    rows_left = tl.minimum(M - first, ROWS).to(tl.int32)
    eight = ()
    for j in tl.static_range(8):
        inside = (row + j < rows_left) & (column < K)[None, :]
        pointer = x_ptr + (first + row + j) * K + column[None, :]
        eight = eight + (to_float32(tl.load(pointer, mask=inside, other=0.0)),)
    low = (eight[0] + eight[1]) + (eight[2] + eight[3])
    high = (eight[4] + eight[5]) + (eight[6] + eight[7])
    # A sum that is zero is +0.
    total = round_to_dtype(fold_rows(low + high) + 0.0, sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + tile.to(tl.int64) * K + column, total, mask=column < K)


_fold = Launcher(_reduction_fold_kernel, num_warps=4)


@remembered
def _launch(M: int, K: int, rows: int) -> Launch:
    tiles = cdiv(K, FOLD_COLUMNS)
    options = (FOLDED_ROWS, FOLD_COLUMNS)
    return Launch(_fold, (tiles * rows, 1, 1), [TENSOR, TENSOR, M, K, tiles], options)


def column_sum(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute ``reference.reduction.column_sum`` of (M, K) fp32, bf16 or fp16, of the values in fp32, rounded to
    ``dtype``.

    Of the sums of consecutive groups of R rows each, R a power of two and zeros where a matrix ends, it is also the sum
    of that matrix.
    """
    check_device(x)
    if x.dim() != 2:
        raise ValueError(f"column_sum takes a matrix, got shape {tuple(x.shape)}; flatten its leading dims")
    x = x.contiguous()
    new = beside(x)
    while True:
        M, K = x.shape
        rows = cdiv(M, FOLDED_ROWS) or 1
        last = rows == 1
        sums = new((K,), (1,), dtype) if last else new((rows, K), (K or 1, 1), torch.float32)
        if K:
            _launch(x, M, K, rows)([x, sums])
        if last:
            return sums
        x = sums


@triton.jit
def _reduction_rank_sum_kernel(own_ptr, others_ptr, out_ptr, n, rank, others, divisor, BLOCK: tl.constexpr):
    programs = tl.num_programs(0)
    for turn in range(tl.cdiv(n, BLOCK * programs)):
        at = (tl.program_id(0).to(tl.int64) + turn * programs) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(own_ptr + at, mask=at < n, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        other_ptr = others_ptr + at
        for _ in range(rank):
            total += to_float32(tl.load(other_ptr, mask=at < n, other=0.0))
            other_ptr += n
        total += to_float32(own)
        for _ in range(rank, others):
            total += to_float32(tl.load(other_ptr, mask=at < n, other=0.0))
            other_ptr += n
        total = tl.div_rn(total, tl.full([BLOCK], divisor, tl.float32))
        tl.store(out_ptr + at, round_to_dtype(total, out_ptr.dtype.element_ty), mask=at < n)


_rank_sum = Launcher(_reduction_rank_sum_kernel, num_warps=32)


def rank_sum(own: Tensor, others: Tensor, rank: int, divisor: int, out: Tensor, alone: bool = True) -> None:
    """``reference.reduction.rank_sum``, of contiguous tensors.

    Raises:
        ValueError: tensors the kernels cannot reach.
    """
    check_device(own)
    n = own.numel()
    if n:
        programs = min(cdiv(n, RANKS_BLOCK), RANKS_PROGRAMS_ALONE if alone else RANKS_PROGRAMS_BESIDE)
        arguments = own, others, out, n, rank, others.shape[0], divisor
        _rank_sum((programs, 1, 1), arguments, (RANKS_BLOCK,))
