"""Current scaling of small groups in one launch: while some programs take amaxes, others write the codes before them.

An amax must be known before the first code is written, so every element is read twice. Groups have scales of their own:
one that is small beside the GPU's cache, and that is quantized soon after its amax was taken, is read from there.
Programs are numbered in the order in which they begin: the amaxes of the first few groups, then by turns the amaxes of
a later group and the codes of an earlier one. A program waits only for programs of smaller numbers, which have begun
and so will end, whatever order the GPU starts programs in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat, cdiv, padded_rows
from .codecs import fp8_codes, magnitude_of_four, pack_codes
from .launch import Launcher
from .scaling import scale_from_amax
from .tiles import is_wide, load_rows, store_rows, store_transposed

TILE_ROWS = 64
TILE_COLUMNS = 256
BAND_ROWS = 2 * TILE_ROWS  # rows of one group: a program takes the amax of two tiles
AHEAD_BYTES = 12 << 20
"""What is read before the codes of the first group are written; larger groups are not taken."""


@triton.jit
def _sizes(splits_ptr, index, before, T, groups, BAND_ROWS: tl.constexpr):
    """Return rows int64 and bands int32 of groups; what does not fit into ``T`` rows is cut.

    Args:
        index: numbers of consecutive groups; those from ``groups`` on are empty.
        before: rows of all groups before.
    """
    size = tl.load(splits_ptr + index, mask=index < groups, other=0).to(tl.int64)
    end = before + tl.cumsum(size, axis=0)
    size = tl.minimum(end, T) - tl.minimum(end - size, T)
    return size, ((size + (BAND_ROWS - 1)) // BAND_ROWS).to(tl.int32)


@triton.jit
def _task(number, splits_ptr, index, size, bands, T, groups, ahead, across, BAND_ROWS: tl.constexpr):
    """Return what the program of this number does: whether it takes an amax, and of which part, or which tile it
    quantizes.

    Args:
        size, bands: of the groups.
        ahead: how many groups amaxes are ahead of codes.
        across: parts of a band.
    """
    rows_ahead = tl.sum(tl.where(index < ahead, size, 0), axis=0)
    _size, later = _sizes(splits_ptr, index + ahead, rows_ahead, T, groups, BAND_ROWS)
    first = tl.sum(tl.where(index < ahead, bands, 0), axis=0) * across
    parts = first + (tl.cumsum(later, axis=0) - later) * across
    tiles = (tl.cumsum(bands, axis=0) - bands) * (2 * across)
    begun = (parts + tiles <= number) & (index < groups)
    turn = tl.sum(begun.to(tl.int32), axis=0) - 1
    parts_before = tl.max(tl.where(begun, parts, 0), axis=0)
    tiles_before = tl.max(tl.where(begun, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == turn, later, 0), axis=0) * across
    own = tl.where(turn < 0, first, own)
    place = number - parts_before - tiles_before
    takes_amax = place < own
    return takes_amax, tl.where(takes_amax, parts_before + place, tiles_before + place - own)


@triton.jit
def _task_of_equal_groups(number, parts, groups, ahead):
    """Return the task like ``_task``, for groups with equal numbers of parts."""
    first = ahead * parts
    turns = groups - ahead
    since = number - first
    turn = tl.minimum(since // (3 * parts), turns)
    place = since - turn * (3 * parts)
    takes_amax = (number < first) | ((place < parts) & (turn < turns))
    part = tl.where(number < first, number, first + turn * parts + place)
    tile = 2 * turn * parts + place - tl.where(turn < turns, parts, 0)
    return takes_amax, tl.where(takes_amax, part, tile)


@triton.jit
def _group_of(band, size, bands, rows, T, groups, RAGGED: tl.constexpr, BAND_ROWS: tl.constexpr):
    """Return a band's group, or ``groups`` after the last; the group's first and last row, first band and bands."""
    if RAGGED:
        ends = tl.cumsum(bands, axis=0)
        row_ends = tl.cumsum(size, axis=0)
        before = ends <= band
        group = tl.minimum(tl.sum(before.to(tl.int32), axis=0), groups)
        first = tl.max(tl.where(before, ends, 0), axis=0)
        last = tl.min(tl.where(before, 0x7FFFFFFF, ends), axis=0)
        start = tl.max(tl.where(before, row_ends, 0), axis=0)
        end = tl.minimum(tl.min(tl.where(before, 0x7FFFFFFFFFFFFFFF, row_ends), axis=0), T)
        count = tl.where(group < groups, last - first, 0)
    else:
        count = tl.cdiv(rows, BAND_ROWS).to(tl.int32)
        group = band // count
        first = group * count
        start = group.to(tl.int64) * rows
        end = start + rows
    return group, start, end, first, count


@triton.jit
def _take_amax(
    x_ptr, amax_ptr, done_ptr, part, across, size, bands, rows, T, K, groups,
    RAGGED: tl.constexpr, BAND_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise the amax of a group to that of a part of it, and say that this part is done."""
    band = part // across
    k0 = (part - band * across) * COLUMNS
    group, start, end, first, _count = _group_of(band, size, bands, rows, T, groups, RAGGED, BAND_ROWS)
    source = start + (band - first).to(tl.int64) * BAND_ROWS
    left = (end - source).to(tl.int32)
    QUARTER: tl.constexpr = BAND_ROWS // 4
    row = tl.arange(0, QUARTER)[:, None]
    column = k0 + tl.arange(0, COLUMNS)[None, :]
    x = x_ptr + (source + row) * K + column
    quarters = ()
    for j in tl.static_range(4):
        inside = (row < left - j * QUARTER) & (column < K)
        quarters = quarters + (tl.load(x + j * QUARTER * K, mask=inside, other=0.0),)
    largest = magnitude_of_four(*quarters)
    # A maximum over nothing but NaN is NaN.
    value = tl.maximum(tl.max(tl.max(largest, axis=1), axis=0), 0.0)
    bits = amax_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(bits + group, value.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_add(done_ptr + group, 1, sem="release")


@triton.jit(
    do_not_specialize=["groups", "ahead"],
    do_not_specialize_on_alignment=["splits_ptr", "scale_inv_ptr", "amax_ptr", "done_ptr"],
)
def _grouped_current_kernel(
    x_ptr, splits_ptr, data_ptr, transpose_ptr, scale_inv_ptr, amax_ptr, done_ptr, T, K, rows, groups, ahead,
    epsilon,
    E5M2: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr, POWER_2: tl.constexpr, RAGGED: tl.constexpr, GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    WIDE: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    # ``T``: rows of ``x`` in all. ``rows``: of the transposed codes, all groups padded; without RAGGED of a matrix.
    # ``done_ptr``: parts of each group whose amax is taken, then how many programs have begun.
    BAND_ROWS: tl.constexpr = 2 * TILE_ROWS
    rows = tl.zeros([], tl.int32) + rows  # also where a single row is a constant of the kernel
    across = tl.cdiv(K, TILE_COLUMNS)
    done_ptr = done_ptr.to(tl.pointer_type(tl.int32))
    number = tl.atomic_add(done_ptr + groups, 1, sem="relaxed")
    if RAGGED:
        index = tl.arange(0, GROUPS)
        size, bands = _sizes(splits_ptr, index, 0, T, groups, BAND_ROWS)
        takes_amax, task = _task(number, splits_ptr, index, size, bands, T, groups, ahead, across, BAND_ROWS)
        if number == 0:  # groups without rows have no task
            scales = scale_from_amax(tl.zeros([GROUPS], tl.float32), epsilon, FP8_MAX, OVERFLOW, POWER_2)
            inverses = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scales)
            tl.store(scale_inv_ptr + index, inverses, mask=(index < groups) & (bands == 0))
    else:
        size = 0
        bands = 0
        takes_amax, task = _task_of_equal_groups(number, tl.cdiv(rows, BAND_ROWS) * across, groups, ahead)
    if WIDE:
        K = K.to(tl.int64)
        rows = rows.to(tl.int64)
    if takes_amax:
        _take_amax(
            x_ptr, amax_ptr, done_ptr, task, across, size, bands, rows, T, K, groups, RAGGED, BAND_ROWS, TILE_COLUMNS,
        )  # fmt: skip
        return
    band = task // (2 * across)
    place = task - band * (2 * across)
    group, start, end, first, count = _group_of(band, size, bands, rows, T, groups, RAGGED, BAND_ROWS)
    k0 = (place >> 1).to(tl.int64) * TILE_COLUMNS
    row_in_group = (band - first).to(tl.int64) * BAND_ROWS + (place & 1) * TILE_ROWS
    m0 = row_in_group
    if RAGGED:
        m0 += first.to(tl.int64) * BAND_ROWS
    if m0 >= rows:
        return
    rows_left = tl.minimum(rows - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    row = tl.arange(0, TILE_ROWS // 4)[:, None] * 4
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    source = (start + row_in_group) * K + k0
    offsets = row * K + column
    left = tl.minimum(end - start - row_in_group, TILE_ROWS).to(tl.int32) - row
    there = column < columns_left
    loaded = tl.where(group < groups, left, 0)  # rows after the last group become zeros
    xs = load_rows(x_ptr + source + offsets, K, loaded, there, EVICTION)
    known = tl.minimum(group, groups - 1)
    while tl.atomic_add(done_ptr + known, 0, sem="acquire") < count * across:
        pass
    amax = tl.load(amax_ptr + known, volatile=True)
    scale = scale_from_amax(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2)
    codes = fp8_codes(xs, scale, E5M2, True)
    if ROWWISE:
        store_rows(data_ptr + source + offsets, codes, K, left, there)
    if COLUMNWISE:
        words = pack_codes(*codes)
        target = transpose_ptr + (0 if RAGGED else start * K)
        store_transposed(target, words, m0, k0, rows, rows_left, columns_left, WORDS, EVEN)
    if (row_in_group == 0) & (k0 == 0):
        tl.store(scale_inv_ptr + group, tl.div_rn(1.0, scale), mask=group < groups)


# with so few registers four programs fit on a multiprocessor
_current = Launcher(_grouped_current_kernel, num_warps=8, maxnreg=64)


def takes(x: Tensor, splits: Tensor | None, groups: int, alignment: int) -> bool:
    """Return whether :func:`quantize` takes these groups: small ones that no band has two of."""
    small = 0 < x.numel() * x.element_size() <= AHEAD_BYTES * groups
    return small and (splits is None or alignment % BAND_ROWS == 0)


def outputs(
    shape: tuple[int, ...],
    device: torch.device,
    splits: Tensor | None,
    groups: int,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
) -> tuple[int, Tensor | None, Tensor | None, Tensor]:
    """Return rows of the transposed codes, of all groups or without splits of a matrix; then where codes go, and
    scales.
    """
    K = shape[-1]
    rows = shape[1] if splits is None else padded_rows(shape[0], groups, alignment)
    transposed = (groups, K, rows) if splits is None else (K, rows)
    data = torch.empty(shape, dtype=torch.uint8, device=device) if rowwise else None
    transpose = torch.empty(transposed, dtype=torch.uint8, device=device) if columnwise else None
    return rows, data, transpose, torch.empty(groups, dtype=torch.float32, device=device)


def quantize(
    x: Tensor,
    splits: Tensor | None,
    fmt: ElementFormat,
    groups: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    keep_amax: bool,
) -> list[Tensor]:
    """Compute ``reference.grouped_quantize.quantize_current`` of contiguous ``x`` that :func:`takes` agrees to."""
    K = x.shape[-1]
    T = x.numel() // K
    rows, data, transpose, scale_inv = outputs(
        x.shape, x.device, splits, groups, rowwise, columnwise, alignment
    )
    # The amaxes and what is counted. One launch clears both, unless the amaxes live on.
    sizes = [groups, groups + 1] if keep_amax else [2 * groups + 1]
    cleared = [torch.zeros(size, dtype=torch.float32, device=x.device) for size in sizes]
    amax, done = cleared if keep_amax else cleared[0].split([groups, groups + 1])
    bands = cdiv(rows, BAND_ROWS) * (groups if splits is None else 1)
    ahead = min(AHEAD_BYTES * groups // (x.numel() * x.element_size()), groups)
    even = rows % TILE_ROWS == 0 and K % TILE_COLUMNS == 0
    # An absent buffer passes any pointer: the constants keep the kernel from touching them.
    _current(
        (3 * bands * cdiv(K, TILE_COLUMNS), 1, 1),
        (
            x, scale_inv if splits is None else splits, x if data is None else data,
            x if transpose is None else transpose, scale_inv, amax, done, T, K, rows, groups, ahead, float(epsilon),
        ),
        (
            fmt.name == "e5m2", rowwise, columnwise, fmt.max, FLT_MAX, power_2, splits is not None,
            triton.next_power_of_2(groups), TILE_ROWS, TILE_COLUMNS, even, rows % 4 == 0, is_wide(rows, K),
            "evict_first",
        ),
    )  # fmt: skip
    buffers = (data, transpose, scale_inv, amax if keep_amax else None)
    return [buffer for buffer in buffers if buffer is not None]
