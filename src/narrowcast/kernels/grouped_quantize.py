"""Per-tensor FP8 of groups in one launch: every row finds its group, and the group's scale, on the device.

Rows (T, K) are walked in the order of the transposed codes, where groups start at multiples of an alignment. Four
interleaved rows of a tile are then in one group, and what lies between two groups is written as zeros on the way.
Behind the last group there is room for the rows beyond the sum of the splits; their codes become zero, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat, cdiv
from . import grouped_current
from .codecs import fp8_codes, magnitude, magnitude_of_four, pack_codes, round_to_dtype, to_float32
from .first_scale import ROWS_AT_ONCE, end_part, own_scales, rule_of, take_part, words_of
from .launch import Launcher, check_device, check_input
from .scaling import scale_from_amax
from .tiles import (
    is_wide,
    load_rows,
    load_tile,
    store_rows,
    store_tile,
    store_transposed,
    tile_grid,
    tile_position,
)

TILE_ROWS = 64
TILE_COLUMNS = 128
AMAX_ROWS = 32
AMAX_COLUMNS = 256
BLOCK_ROWS = 64  # whose order of summation ``reference.reduction`` fixes
FOLD_COLUMNS = 128


@triton.jit
def group_ends(splits_ptr, groups, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr):
    """Return where the groups end in rows one after the other, and in rows with every group padded: int64 [GROUPS]
    each.
    """
    index = tl.arange(0, GROUPS)
    splits = tl.load(splits_ptr + index, mask=index < groups, other=0).to(tl.int64)
    padded = (splits + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    return tl.cumsum(splits, axis=0), tl.cumsum(padded, axis=0)


@triton.jit
def groups_of(row, ends, groups, GROUPS: tl.constexpr):
    """Return the number of the group of every row of [R]; ``groups`` for rows after the last one."""
    return tl.minimum(tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1), groups)


@triton.jit
def raise_amax(amax_ptr, group, value, groups):
    """Raise every group's amax to the values of its rows, all [R]; one atomic where all rows are in one group."""
    # A maximum over nothing but NaN is NaN.
    value = tl.where(group < groups, tl.maximum(value, 0.0), 0.0)
    first = tl.min(group, axis=0)
    bits = amax_ptr.to(tl.pointer_type(tl.int32))
    if first == tl.max(group, axis=0):
        largest = tl.max(value, axis=0)
        inside = first < groups
        before = tl.load(amax_ptr + first, mask=inside, other=0.0)
        tl.atomic_max(
            bits + first, largest.to(tl.int32, bitcast=True), mask=inside & (largest > before), sem="relaxed"
        )
    else:
        known = tl.load(amax_ptr + group, mask=group < groups, other=0.0)
        tl.atomic_max(bits + group, value.to(tl.int32, bitcast=True), mask=value > known, sem="relaxed")


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["splits_ptr", "amax_ptr"])
def _grouped_quantize_amax_kernel(
    x_ptr,
    splits_ptr,
    amax_ptr,
    T,
    K,
    size,
    groups,
    RAGGED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    column = tl.arange(0, COLUMNS)
    for start in tl.range(0, K, COLUMNS):
        inside = (row < T)[:, None] & (column < K - start)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + (start + column)[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(x))
    if RAGGED:
        ends, _ = group_ends(splits_ptr, groups, 1, GROUPS)
        group = groups_of(row, ends, groups, GROUPS)
    else:
        group = tl.minimum(row // size, groups).to(tl.int32)
    raise_amax(amax_ptr, group, tl.max(largest, axis=1), groups)


@triton.jit
def encoding_scale(
    scale,
    epsilon,
    unseen,
    CURRENT: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return the scale from what was loaded: a scale, or an amax under current scaling."""
    if CURRENT:
        return scale_from_amax(scale, epsilon, FP8_MAX, OVERFLOW, POWER_2)
    if FIRST == "given":
        return tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale)
    return scale


@triton.jit
def locate(splits_ptr, m0, T, groups, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr):
    """Return the group and the row of ``x`` of every fourth of ROWS padded rows from ``m0``, a multiple of ROWS; and
    [R, 1] how many rows of its group follow.
    """
    ends, padded_ends = group_ends(splits_ptr, groups, ALIGNMENT, GROUPS)
    quad = tl.arange(0, ROWS // 4) * 4
    # one row is found for all of them if no group begins in between
    FOUND: tl.constexpr = ROWS // 4 if (ROWS - 1) & ALIGNMENT else 1
    before = padded_ends[None, :] <= (m0 + tl.arange(0, FOUND) * 4)[:, None]
    group = tl.minimum(tl.sum(before.to(tl.int32), axis=1), groups)
    start = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    padded_start = tl.max(tl.where(before, padded_ends[None, :], 0), axis=1)
    end = tl.minimum(tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, ends[None, :]), axis=1), T)
    source = start + (m0 + quad - padded_start)
    return tl.broadcast_to(group, [ROWS // 4]), source, (end - source)[:, None]


@triton.jit
def loaded_scales(splits_ptr, scale_ptr, groups, GROUPS: tl.constexpr):
    """Return the scales of all groups [GROUPS], their places, and whether one of a group with rows is 0."""
    index = tl.arange(0, GROUPS)
    scales = tl.load(scale_ptr + index, mask=index < groups, other=1.0)
    splits = tl.load(splits_ptr + index, mask=index < groups, other=0)
    # a group without rows has no amax, and no tensor: its scale may stay 0 for ever
    return scales, index, tl.max(((scales == 0.0) & (splits > 0)).to(tl.int32), axis=0) != 0


@triton.jit
def scale_of_rows(scales, index, group, groups):
    """Return every row's scale [R] out of those of all groups; 1 for rows after the last group."""
    own = tl.sum(tl.where(index[None, :] == group[:, None], scales[None, :], 0.0), axis=1)
    return tl.where(group < groups, own, 1.0)


@triton.jit
def store_inverses(
    scale_inv_ptr,
    scale_ptr,
    groups,
    epsilon,
    unseen,
    CURRENT: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Store the reciprocals of all groups' scales."""
    index = tl.arange(0, GROUPS)
    scale = tl.load(scale_ptr + index, mask=index < groups, other=1.0)
    scale = encoding_scale(scale, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST)
    store_reciprocals(scale_inv_ptr, scale, index, groups)


@triton.jit
def store_reciprocals(scale_inv_ptr, scale, index, groups):
    """Store the reciprocals of scales."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(scale_inv_ptr + index, inverse, mask=index < groups)


@triton.jit
def _load(
    x_ptr, splits_ptr, m0, k0, shape, member, RAGGED: tl.constexpr, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return a tile as four interleaved rows, and of every fourth row [R] its group and, if RAGGED, where it is in
    ``x`` and [R, 1] how many rows of its group are left.
    """
    T, K, rows, groups = shape
    quad = tl.arange(0, TILE_ROWS // 4) * 4
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    rows_left = tl.minimum(rows - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    if RAGGED:
        group, source, left = locate(splits_ptr, m0, T, groups, TILE_ROWS, ALIGNMENT, GROUPS)
        tile = x_ptr + (source[:, None] * K + k0 + column)
        mask = (column < columns_left) & (group < groups)[:, None]
        return load_rows(tile, K, left, mask, ""), group, source, left
    else:
        group = tl.zeros([TILE_ROWS // 4], tl.int32) + member.to(tl.int32)
        tile = x_ptr + (member * rows * K + m0 * K + k0)
        row = quad[:, None]
        xs = load_tile(tile, row * K + column, row, column, K, rows_left, columns_left, EVEN)
        return xs, group, quad, row


@triton.jit
def _own_scales(
    scales, unseen, x_ptr, splits_ptr, words_ptr, shape, member, RAGGED: tl.constexpr, ALIGNMENT: tl.constexpr,
    GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return scales, of all groups or of a matrix, and instead of 0 those of the amaxes."""
    K, rows, groups = shape[1], shape[2], shape[3]
    columns = tl.maximum(tl.cdiv(K, TILE_COLUMNS), 1)
    parts = (tl.cdiv(rows, TILE_ROWS) * columns).to(tl.int32)
    own_ptr = words_ptr + member  # of this matrix, or of all groups
    part = take_part(own_ptr, groups)
    while part < parts:
        m = (part // columns).to(tl.int64) * TILE_ROWS
        k = (part % columns).to(tl.int64) * TILE_COLUMNS
        for row in range(0, tl.minimum(rows - m, TILE_ROWS).to(tl.int32), ROWS_AT_ONCE):
            values, group, _, _ = _load(
                x_ptr, splits_ptr, m + row, k, shape, member, RAGGED, ALIGNMENT, GROUPS, ROWS_AT_ONCE, TILE_COLUMNS,
                EVEN,
            )  # fmt: skip
            largest = tl.max(magnitude_of_four(*values), axis=1)
            raise_amax(words_ptr, group, largest, groups)
        end_part(own_ptr, groups)
        part = take_part(own_ptr, groups)
    if RAGGED:
        index = tl.arange(0, GROUPS)
        return own_scales(scales, unseen, own_ptr, groups, parts, index, index < groups)
    else:
        return own_scales(scales, unseen, own_ptr, groups, parts, 0, None)


@triton.jit(
    do_not_specialize=["groups", "band_bits"],
    do_not_specialize_on_alignment=["splits_ptr", "scale_ptr", "scale_inv_ptr", "amax_ptr", "words_ptr"],
)
def _grouped_quantize_cast_kernel(
    x_ptr, splits_ptr, scale_ptr, data_ptr, transpose_ptr, scale_inv_ptr, amax_ptr, words_ptr, T, K, rows, groups,
    band_bits, epsilon, unseen, E5M2: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr,
    CURRENT: tl.constexpr, FP8_MAX: tl.constexpr, OVERFLOW: tl.constexpr, POWER_2: tl.constexpr, FIRST: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # ``rows``: of the transposed codes, all groups padded; without RAGGED of every matrix of the batch.
    # FIRST: as in ``float8.py``.
    tile_m, tile_k = tile_position(band_bits, CURRENT)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= rows:
        return
    if WIDE:
        rows = rows.to(tl.int64)
        K = K.to(tl.int64)
    member = tl.program_id(2).to(tl.int64)
    shape = T, K, rows, groups
    if FIRST == "own":
        if RAGGED:
            scales, index, is_unseen = loaded_scales(splits_ptr, scale_ptr, groups, GROUPS)
        else:
            scales = tl.load(scale_ptr + member)
            is_unseen = scales == 0.0
        if is_unseen:
            scales = _own_scales(
                scales, unseen, x_ptr, splits_ptr, words_ptr, shape, member, RAGGED, ALIGNMENT, GROUPS, TILE_ROWS,
                TILE_COLUMNS, EVEN,
            )  # fmt: skip

    xs, group, source, left = _load(
        x_ptr, splits_ptr, m0, k0, shape, member, RAGGED, ALIGNMENT, GROUPS, TILE_ROWS, TILE_COLUMNS, EVEN
    )  # fmt: skip
    rows_left = tl.minimum(rows - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    row = tl.arange(0, TILE_ROWS // 4)[:, None] * 4
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    offsets = row * K + column
    if RAGGED:
        loaded = tl.load(scale_ptr + group, mask=group < groups, other=1.0)
        if FIRST == "own":
            if is_unseen:
                loaded = scale_of_rows(scales, index, group, groups)
        scale = encoding_scale(loaded, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST)[:, None]
    elif FIRST == "own":
        scale = scales
    else:
        loaded = tl.load(scale_ptr + member)
        scale = encoding_scale(loaded, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST)
    if AMAX:
        raise_amax(amax_ptr, group, tl.max(magnitude_of_four(*xs), axis=1), groups)

    codes = fp8_codes(xs, scale, E5M2, CURRENT)
    if ROWWISE:
        if RAGGED:
            data = data_ptr + (source[:, None] * K + k0 + column)
            store_rows(data, codes, K, left, column < columns_left)
        else:
            data = data_ptr + (member * rows * K + m0 * K + k0)
            store_tile(data, offsets, codes, row, column, K, rows_left, columns_left, EVEN)
    if COLUMNWISE:
        words = pack_codes(*codes)
        target = transpose_ptr
        if not RAGGED:
            target += member * rows * K
        store_transposed(target, words, m0, k0, rows, rows_left, columns_left, WORDS, EVEN)
    if (tile_m == 0) & (tile_k == 0):
        if not RAGGED:
            tl.store(scale_inv_ptr + member, tl.div_rn(1.0, scale))
        elif FIRST == "own":
            if not is_unseen:
                scales = tl.where(scales == 0.0, 1.0, scales)  # of groups without rows
            store_reciprocals(scale_inv_ptr, scales, index, groups)
        else:
            store_inverses(
                scale_inv_ptr, scale_ptr, groups, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST, GROUPS
            )  # fmt: skip


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["splits_ptr"])
def _grouped_quantize_fold_kernel(
    x_ptr,
    splits_ptr,
    sums_ptr,
    source_rows,
    K,
    column_tiles,
    groups,
    ROUND: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One sum per block of 64 rows of a group, one block at least; after enough rounds every group has one block.
    block = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) - block * column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    block = block.to(tl.int64)
    index = tl.arange(0, GROUPS)
    splits = tl.load(splits_ptr + index, mask=index < groups, other=0).to(tl.int64)
    for _ in tl.static_range(ROUND):
        splits = tl.where(index < groups, tl.maximum((splits + (ROWS - 1)) // ROWS, 1), 0)
    blocks = tl.where(index < groups, tl.maximum((splits + (ROWS - 1)) // ROWS, 1), 0)
    ends = tl.cumsum(splits, axis=0)
    block_ends = tl.cumsum(blocks, axis=0)
    if block >= tl.max(block_ends, axis=0):
        return
    before = block_ends <= block
    start = tl.max(tl.where(before, ends, 0), axis=0)
    block_start = tl.max(tl.where(before, block_ends, 0), axis=0)
    end = tl.minimum(tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, ends), axis=0), source_rows)
    first = start + (block - block_start) * ROWS + tl.arange(0, ROWS // 8) * 8
    eight = ()
    for j in tl.static_range(8):
        inside = (first + j < end)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + (first + j)[:, None] * K + column[None, :], mask=inside, other=0.0)
        eight = eight + (to_float32(x),)
    low = (eight[0] + eight[1]) + (eight[2] + eight[3])
    high = (eight[4] + eight[5]) + (eight[6] + eight[7])
    # A sum over an axis of size two has one possible result.
    fours = tl.sum(tl.reshape(low + high, [4, 2, COLUMNS]), axis=1)
    pairs = tl.sum(tl.reshape(fours, [2, 2, COLUMNS]), axis=1)
    # A sum that is zero is +0.
    total = round_to_dtype(tl.sum(pairs, axis=0) + 0.0, tl.float32)
    tl.store(sums_ptr + block * K + column, total, mask=column < K)


_amax = Launcher(_grouped_quantize_amax_kernel, num_warps=4)
_cast = Launcher(_grouped_quantize_cast_kernel, num_warps=4)
_fold = Launcher(_grouped_quantize_fold_kernel, num_warps=4)


def _check(x: Tensor, splits: Tensor | None, alignment: int) -> None:
    check_input(x, 2)
    rank = 3 if splits is None else 2
    if x.dim() != rank:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; give rank {rank}, {'with' if rank == 2 else 'without'} splits"
        )
    if splits is not None and (alignment < 4 or alignment & (alignment - 1)):
        raise ValueError(f"alignment is {alignment}; use a power of two, 4 or more")


def amaxes(x: Tensor, splits: Tensor | None, groups: int) -> Tensor:
    """Return max|x| of every group: fp32 (G,).

    Args:
        x: contiguous.
        splits, groups: as of :func:`quantize_current`.
    """
    amax = torch.zeros(groups, dtype=torch.float32, device=x.device)
    K = x.shape[-1]
    T = x.numel() // K if K else 0
    if T:
        size = T if splits is not None else x.shape[1]
        _amax(
            (cdiv(T, AMAX_ROWS), 1, 1),
            (x, amax if splits is None else splits, amax, T, K, size, groups),
            (splits is not None, power_of_2(groups), AMAX_ROWS, AMAX_COLUMNS),
        )
    return amax


def _run_cast(
    x: Tensor,
    splits: Tensor | None,
    scale: Tensor,
    fmt: ElementFormat,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None,
    current: bool,
    power_2: bool,
    epsilon: float,
    unseen: float = 0.0,
) -> list[Tensor]:
    groups, K = scale.shape[0], x.shape[-1]
    rows, data, transpose, scale_inv = grouped_current.outputs(
        x.shape, x.device, splits, groups, rowwise, columnwise, alignment
    )
    if groups:
        first = rule_of(unseen)
        # One program at least, which writes the scales; the second dim is what a band of tiles may reach.
        (across, down, _), band_bits = tile_grid(max(cdiv(rows, TILE_ROWS), 1), max(cdiv(K, TILE_COLUMNS), 1))
        even = rows % TILE_ROWS == 0 and K % TILE_COLUMNS == 0
        # An absent buffer passes any pointer: the constants keep the kernel from touching them.
        _cast(
            (across, down, groups if splits is None else 1),
            (
                x, scale if splits is None else splits, scale, x if data is None else data,
                x if transpose is None else transpose, scale_inv, scale if amax is None else amax,
                words_of(x, groups) if first == "own" else scale, x.shape[0], K, rows, groups, band_bits,
                float(epsilon), unseen,
            ),
            (
                fmt.name == "e5m2", rowwise, columnwise, amax is not None, current, fmt.max, FLT_MAX,
                power_2 and current, first, splits is not None, alignment, power_of_2(groups), TILE_ROWS, TILE_COLUMNS,
                even, rows % 4 == 0, is_wide(rows, K),
            ),
        )  # fmt: skip
    return [buffer for buffer in (data, transpose, scale_inv) if buffer is not None]


def quantize(
    x: Tensor,
    splits: Tensor | None,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None = None,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Compute ``reference.grouped_quantize.quantize``: both directions and the amaxes from one read of ``x``.

    ``alignment`` must be a power of two, 4 or more.
    """
    _check(x, splits, alignment)
    x = x.contiguous()
    return _run_cast(x, splits, scale, fmt, rowwise, columnwise, alignment, amax, False, False, 0.0, unseen)


def quantize_current(
    x: Tensor,
    splits: Tensor | None,
    fmt: ElementFormat,
    *,
    groups: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """Compute ``reference.grouped_quantize.quantize_current``: no host synchronization.

    Small groups are read from memory once; of larger ones a pass takes the amaxes and another one writes the codes.
    """
    _check(x, splits, alignment)
    x = x.contiguous()
    if amax is None and grouped_current.takes(x, splits, groups, alignment):
        return grouped_current.quantize(
            x, splits, fmt, groups, power_2, epsilon, rowwise, columnwise, alignment, keep_amax
        )
    amax = amaxes(x, splits, groups) if amax is None else amax
    buffers = _run_cast(x, splits, amax, fmt, rowwise, columnwise, alignment, None, True, power_2, epsilon)
    return [*buffers, amax] if keep_amax else buffers


def column_sum(x: Tensor, splits: Tensor) -> Tensor:
    """Compute ``reference.grouped_quantize.column_sum``."""
    check_device(x)
    if x.dim() != 2:
        raise ValueError(f"column_sum takes a matrix, got shape {tuple(x.shape)}; flatten its leading dims")
    x = x.contiguous()
    K, groups = x.shape[1], splits.shape[0]
    most = x.shape[0]  # rows that one group may have
    done = 0
    while True:
        most = cdiv(most, BLOCK_ROWS)
        # a group's last rows may need a block of their own
        blocks = groups if most <= 1 else cdiv(x.shape[0], BLOCK_ROWS) + groups
        sums = torch.empty((blocks, K), dtype=torch.float32, device=x.device)
        if sums.numel():
            tiles = cdiv(K, FOLD_COLUMNS)
            _fold(
                (tiles * blocks, 1, 1),
                (x, splits, sums, x.shape[0], K, tiles, groups),
                (done, power_of_2(groups), BLOCK_ROWS, FOLD_COLUMNS),
            )
        if most <= 1:
            return sums
        x, done = sums, done + 1


def power_of_2(groups: int) -> int:
    """Return how many groups a kernel is compiled for: a power of two, at least as many."""
    return triton.next_power_of_2(max(groups, 1))
