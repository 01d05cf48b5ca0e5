"""Padding and unpadding of grouped rows: one launch for all groups, which finds every row's group on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .launch import Launcher, check_device

ROWS = 16
BLOCK_ROWS = 128  # for formats with blocks along the rows: no block may be in two groups
BYTES = 2048  # bytes of a row, per program
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(
    do_not_specialize=["source_rows", "rows", "groups"],
    do_not_specialize_on_alignment=["splits_ptr", "padded_splits_ptr", "padded_ends_ptr"],
)
def _grouped_move_kernel(
    x_ptr,
    splits_ptr,
    out_ptr,
    padded_splits_ptr,
    padded_ends_ptr,
    source_rows,
    rows,
    K,
    groups,
    alignment,
    PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    splits = tl.load(splits_ptr + group, mask=group < groups, other=0).to(tl.int64)
    padded_splits = (splits + (alignment - 1)) // alignment * alignment
    ends = tl.cumsum(splits, axis=0)
    padded_ends = tl.cumsum(padded_splits, axis=0)
    if PAD:
        source_ends = ends[None, :]
        target_ends = padded_ends[None, :]
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            written = padded_splits.to(padded_splits_ptr.dtype.element_ty)
            tl.store(padded_splits_ptr + group, written, mask=group < groups)
            tl.store(padded_ends_ptr + group, padded_ends.to(tl.int32), mask=group < groups)
    else:
        source_ends = padded_ends[None, :]
        target_ends = ends[None, :]

    # Ends grow with the group, so a maximum over the groups before a row and a minimum over the others find its own.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    before = target_ends <= row
    start = tl.max(tl.where(before, target_ends, 0), axis=1, keep_dims=True)
    source_start = tl.max(tl.where(before, source_ends, 0), axis=1, keep_dims=True)
    source_end = tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, source_ends), axis=1, keep_dims=True)
    last = tl.max(target_ends, axis=1, keep_dims=True)
    source = source_start + (row - start)
    inside = (row < last) & (source < source_end) & (source < source_rows)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x_ptr + source * K + column, mask=inside & (column < K), other=0)
    tl.store(out_ptr + row * K + column, values, mask=(row < rows) & (column < K))


@triton.jit(
    do_not_specialize=["available", "blocks", "groups"], do_not_specialize_on_alignment=["splits_ptr"]
)
def _grouped_blocks_kernel(
    splits_ptr,
    table_ptr,
    available,
    blocks,
    groups,
    ALIGNMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    splits = tl.load(splits_ptr + group, mask=group < groups, other=0).to(tl.int64)
    ends = tl.cumsum(splits, axis=0)[None, :]
    padded_ends = tl.cumsum((splits + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT, axis=0)[None, :]
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (block * ALIGNMENT)[:, None].to(tl.int64)
    before = padded_ends <= row
    start = tl.max(tl.where(before, ends, 0), axis=1) + block * ALIGNMENT
    start -= tl.max(tl.where(before, padded_ends, 0), axis=1)
    end = tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, ends), axis=1)
    # Behind the last group nothing was smaller than that limit, and there is nothing to read.
    end = tl.where(end < 0x7FFFFFFFFFFFFFFF, tl.minimum(end, available), 0)
    left = tl.minimum(tl.maximum(end - start, 0), ALIGNMENT)
    tl.store(table_ptr + 2 * block, start, mask=block < blocks)
    tl.store(table_ptr + 2 * block + 1, left, mask=block < blocks)


_move = Launcher(_grouped_move_kernel, num_warps=4)
_blocks = Launcher(_grouped_blocks_kernel, num_warps=4)


def blocks_of_groups(splits: Tensor, available: int, rows: int) -> Tensor:
    """Return where each 128 rows of ``pad_rows(x, splits, 128, rows)`` come from: int64 (rows / 128, 2), start and how
    many.

    Args:
        splits: as of :func:`pad_rows`.
        available: rows of ``x``.
        rows: a multiple of 128.
    """
    count, groups = rows // BLOCK_ROWS, splits.shape[0]
    table = torch.empty((count, 2), dtype=torch.int64, device=splits.device)
    if count:
        _blocks(
            (cdiv(count, ROWS), 1, 1),
            (splits.contiguous(), table, available, count, groups),
            (BLOCK_ROWS, max(triton.next_power_of_2(groups), 1), ROWS),
        )
    return table


def pad_rows(x: Tensor, splits: Tensor, alignment: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.grouped_padding.pad_rows``; ``x`` of a dtype of 1, 2 or 4 bytes."""
    padded_splits = torch.empty(splits.shape, dtype=splits.dtype, device=splits.device)
    padded_ends = torch.empty(splits.shape, dtype=torch.int32, device=splits.device)
    return _run(x, splits, alignment, rows, (padded_splits, padded_ends)), padded_splits, padded_ends


def unpad_rows(padded: Tensor, splits: Tensor, alignment: int, rows: int) -> Tensor:
    """Compute ``reference.grouped_padding.unpad_rows``; ``padded`` of a dtype of 1, 2 or 4 bytes."""
    return _run(padded, splits, alignment, rows, None)


def _run(
    x: Tensor, splits: Tensor, alignment: int, rows: int, written: tuple[Tensor, Tensor] | None
) -> Tensor:
    source, splits = raw(x), splits.contiguous()
    K, G = x.shape[1], splits.shape[0]
    out = source.new_empty((rows, K))
    columns = BYTES // x.element_size()
    # One program at least, which writes the padded splits even if there is no row.
    _move(
        (max(cdiv(rows, ROWS), 1), max(cdiv(K, columns), 1), 1),
        (source, splits, out, *(written or (splits, splits)), x.shape[0], rows, K, G, alignment),
        (written is not None, max(triton.next_power_of_2(G), 1), ROWS, columns),
    )
    return out.view(x.dtype)


def raw(x: Tensor) -> Tensor:
    """Return a matrix as integers of the size of its elements, contiguous, for kernels that move rows.

    Raises:
        ValueError: ``check_device`` refuses, or a dtype of other than 1, 2 or 4 bytes.
    """
    check_device(x)
    if x.element_size() not in _RAW:
        raise ValueError(f"cannot move rows of {x.dtype}; use a dtype of 1, 2 or 4 bytes")
    return x.contiguous().view(_RAW[x.element_size()])
