"""Per-tensor FP8 of a gated activation of groups of rows, or of its gradient, computed on the way in.

Values are those of ``activation``, rounded as it stores them, and codes those of ``grouped_quantize``: bit for bit what
the two give one after the other. Of a gradient a program computes both halves from one read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat, cdiv
from . import grouped_current
from .activation import activate_gated, activate_gated_backward
from .codecs import fp8_codes, magnitude, magnitudes_of_tile, pack_codes, round_to_dtype, to_float32
from .first_scale import rule_of, words_of
from .fused_producers import Source
from .grouped_quantize import (
    encoding_scale,
    group_ends,
    groups_of,
    loaded_scales,
    locate,
    power_of_2,
    raise_amax,
    store_inverses,
    store_reciprocals,
)
from .launch import Launcher
from .scaling import scale_or_first
from .tiles import is_wide, store_rows, store_transposed, tile_grid, tile_position

TILE_ROWS = 64
TILE_COLUMNS = 128
AMAX_ROWS = 16
AMAX_COLUMNS = 256
FIRST_PROGRAMS = 128
"""That look whether a scale is unknown: more than run at once would make every later cast wait."""


@triton.jit
def _values(
    x, grad, F, inside, FUNCTION: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Return the activation of a gate at ``x`` twice, or the gradients of the gate and of what it multiplies."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    a = to_float32(tl.load(x, mask=inside, other=0.0))
    b = to_float32(tl.load(x + F, mask=inside, other=0.0))
    if BACKWARD:
        g = to_float32(tl.load(grad, mask=inside, other=0.0))
        da, db = activate_gated_backward(g, a, b, FUNCTION, P0, P1, P2)
        return round_to_dtype(da, DTYPE), round_to_dtype(db, DTYPE)
    else:
        y = round_to_dtype(activate_gated(a, b, FUNCTION, P0, P1, P2), DTYPE)
        return y, y


@triton.jit
def _raise_amaxes(
    x_ptr, grad_ptr, splits_ptr, amax_ptr, block, T, F, groups, FUNCTION: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, BACKWARD: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise every group's amax to the values of a block of rows."""
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    column = tl.arange(0, COLUMNS)[None, :]
    for start in tl.range(0, F, COLUMNS):
        inside = (row < T)[:, None] & (column < F - start)
        x = x_ptr + row[:, None] * (2 * F) + (start + column)
        grad = grad_ptr + row[:, None] * F + (start + column)
        first, second = _values(x, grad, F, inside, FUNCTION, P0, P1, P2, BACKWARD)
        largest = tl.maximum(largest, magnitude(first))
        if BACKWARD:
            largest = tl.maximum(largest, magnitude(second))
    ends, _ = group_ends(splits_ptr, groups, 1, GROUPS)
    raise_amax(amax_ptr, groups_of(row, ends, groups, GROUPS), tl.max(largest, axis=1), groups)


@triton.jit(
    do_not_specialize=["groups"],
    do_not_specialize_on_alignment=["splits_ptr", "scale_ptr", "words_ptr", "amax_ptr"],
)
def _grouped_gated_amax_kernel(
    x_ptr,
    grad_ptr,
    splits_ptr,
    scale_ptr,
    words_ptr,
    amax_ptr,
    T,
    F,
    groups,
    unseen,
    FIRST: tl.constexpr,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    BACKWARD: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # FIRST: write scales, in place of 0 those of the amaxes; if all are known, end at once.
    if FIRST:
        scales, index, is_unseen = loaded_scales(splits_ptr, scale_ptr, groups, GROUPS)
        if not is_unseen:
            return
        for block in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
            _raise_amaxes(
                x_ptr, grad_ptr, splits_ptr, words_ptr, block, T, F, groups, FUNCTION, P0, P1, P2, BACKWARD, GROUPS,
                ROWS, COLUMNS,
            )  # fmt: skip
        tl.debug_barrier()  # all threads have raised their amaxes
        done = (words_ptr + groups).to(tl.pointer_type(tl.int32))
        if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            inside = index < groups
            bits = words_ptr.to(tl.pointer_type(tl.int32)) + index
            found = tl.atomic_xchg(bits, index * 0, mask=inside, sem="relaxed").to(tl.float32, bitcast=True)
            tl.store(amax_ptr + index, scale_or_first(scales, unseen, found), mask=inside)
            tl.atomic_xchg(done, 0, sem="relaxed")
    else:
        _raise_amaxes(
            x_ptr, grad_ptr, splits_ptr, amax_ptr, tl.program_id(0), T, F, groups, FUNCTION, P0, P1, P2, BACKWARD,
            GROUPS, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _load(
    x_ptr, grad_ptr, splits_ptr, m0, k0, shape, FUNCTION: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    P2: tl.constexpr, BACKWARD: tl.constexpr, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile's values twice, or both gradients, as four interleaved rows; and what ``locate`` returns."""
    T, F, groups = shape
    column = tl.arange(0, COLUMNS)[None, :]
    group, source, left = locate(splits_ptr, m0, T, groups, ROWS, ALIGNMENT, GROUPS)
    inside = (column < tl.minimum(F - k0, COLUMNS).to(tl.int32)) & (group < groups)[:, None]
    firsts = ()
    seconds = ()
    for j in tl.static_range(4):
        row = (source + j)[:, None]
        x = x_ptr + (row * (2 * F) + k0 + column)
        grad = grad_ptr + (row * F + k0 + column)
        first, second = _values(
            x, grad, F, inside & (left > j), FUNCTION, P0, P1, P2, BACKWARD
        )  # fmt: skip
        firsts = firsts + (first,)
        seconds = seconds + (second,)
    return firsts, seconds, group, source, left


@triton.jit
def _emit(
    xs, scale, data_ptr, transpose_ptr, source, left, m0, k, K, rows, rows_left, columns_left, E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, CURRENT: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Encode four interleaved rows of a tile from column ``k`` on, and store them in both directions."""
    column = tl.arange(0, xs[0].shape[1])[None, :]
    codes = fp8_codes(xs, scale, E5M2, CURRENT)
    if ROWWISE:
        store_rows(data_ptr + (source[:, None] * K + k + column), codes, K, left, column < columns_left)
    if COLUMNWISE:
        words = pack_codes(*codes)
        store_transposed(transpose_ptr, words, m0, k, rows, rows_left, columns_left, WORDS, EVEN)


@triton.jit(
    do_not_specialize=["groups", "band_bits"],
    do_not_specialize_on_alignment=["splits_ptr", "scale_ptr", "own_ptr", "scale_inv_ptr", "amax_ptr"],
)
def _grouped_gated_cast_kernel(
    x_ptr, grad_ptr, splits_ptr, scale_ptr, own_ptr, data_ptr, transpose_ptr, scale_inv_ptr, amax_ptr, T, F, rows,
    groups, band_bits, epsilon, unseen, FUNCTION: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    BACKWARD: tl.constexpr, E5M2: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr,
    CURRENT: tl.constexpr, FP8_MAX: tl.constexpr, OVERFLOW: tl.constexpr, POWER_2: tl.constexpr, FIRST: tl.constexpr,
    ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # ``rows``: of the transposed codes, all groups padded. FIRST: as in ``float8.py``; scales of 0 are in ``own_ptr``.
    tile_m, tile_k = tile_position(band_bits, CURRENT)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= rows:
        return
    if WIDE:
        rows = rows.to(tl.int64)
        F = F.to(tl.int64)
    shape = T, F, groups
    firsts, seconds, group, source, left = _load(
        x_ptr, grad_ptr, splits_ptr, m0, k0, shape, FUNCTION, P0, P1, P2, BACKWARD, ALIGNMENT, GROUPS, TILE_ROWS,
        TILE_COLUMNS,
    )  # fmt: skip
    rows_left = tl.minimum(rows - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(F - k0, TILE_COLUMNS).to(tl.int32)
    loaded = tl.load(scale_ptr + group, mask=group < groups, other=1.0)
    if FIRST == "own":
        loaded = tl.load(own_ptr + group, mask=loaded == 0.0, other=loaded)
    scale = encoding_scale(loaded, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST)[:, None]
    if AMAX:
        largest = magnitudes_of_tile(firsts, seconds, BACKWARD)
        raise_amax(amax_ptr, group, tl.max(largest, axis=1), groups)
    K = 2 * F if BACKWARD else F
    _emit(
        firsts, scale, data_ptr, transpose_ptr, source, left, m0, k0, K, rows, rows_left, columns_left, E5M2, ROWWISE,
        COLUMNWISE, CURRENT, WORDS, EVEN,
    )  # fmt: skip
    if BACKWARD:
        _emit(
            seconds, scale, data_ptr, transpose_ptr, source, left, m0, F + k0, K, rows, rows_left, columns_left, E5M2,
            ROWWISE, COLUMNWISE, CURRENT, WORDS, EVEN,
        )  # fmt: skip
    if (tile_m == 0) & (tile_k == 0):
        if FIRST == "own":
            scales, index, is_unseen = loaded_scales(splits_ptr, scale_ptr, groups, GROUPS)
            if is_unseen:
                scales = tl.load(own_ptr + index, mask=index < groups, other=1.0)
            else:
                scales = tl.where(scales == 0.0, 1.0, scales)  # of groups without rows
            store_reciprocals(scale_inv_ptr, scales, index, groups)
        else:
            store_inverses(
                scale_inv_ptr, scale_ptr, groups, epsilon, unseen, CURRENT, FP8_MAX, OVERFLOW, POWER_2, FIRST, GROUPS
            )  # fmt: skip


_amax = Launcher(_grouped_gated_amax_kernel, num_warps=8)
_cast = Launcher(_grouped_gated_cast_kernel, num_warps=8)


def _operands(source: Source) -> tuple[tuple[Tensor, Tensor], int, tuple[Any, ...]]:
    """Return input and gradient, or the input twice; columns of a half; the kernels' constants."""
    kind, *function = source.constants
    x, *grad = source.operands
    return (x, grad[0] if grad else x), x.shape[1] // 2, (*function, kind == "gated_backward")


def amaxes(source: Source, splits: Tensor, groups: int) -> Tensor:
    """Return ``grouped_quantize.amaxes`` of what the source computes."""
    amax = torch.zeros(groups, dtype=torch.float32, device=source.device)
    _measure(source, splits, amax, amax, groups, 0.0)
    return amax


def _own_scales(source: Source, splits: Tensor, scale: Tensor, groups: int, unseen: float) -> Tensor:
    """Return scales, in place of 0 those of the amaxes; if none of a group with rows is 0, anything.

    A launch of its own, which ends at once then: with what this takes in the cast, as ``first_scale.py`` has it, every
    later cast keeps fewer programs on a multiprocessor, and takes up to 21% longer.
    """
    own = torch.empty(groups, dtype=torch.float32, device=source.device)
    _measure(source, splits, scale, own, groups, unseen)
    return own


def _measure(source: Source, splits: Tensor, scale: Tensor, out: Tensor, groups: int, unseen: float) -> None:
    operands, F, function = _operands(source)
    T = source.shape[0]
    first = bool(unseen)
    programs = min(cdiv(T, AMAX_ROWS), FIRST_PROGRAMS if first else T)
    if groups:
        _amax(
            (max(programs, 1), 1, 1),
            (*operands, splits, scale, words_of(out, groups) if first else scale, out, T, F, groups, unseen),
            (first, *function, power_of_2(groups), AMAX_ROWS, AMAX_COLUMNS),
        )


def _run(
    source: Source,
    splits: Tensor,
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
    operands, F, function = _operands(source)
    groups, T = scale.shape[0], source.shape[0]
    rows, data, transpose, scale_inv = grouped_current.outputs(
        source.shape, source.device, splits, groups, rowwise, columnwise, alignment
    )
    if groups:
        first = rule_of(unseen)
        own = _own_scales(source, splits, scale, groups, unseen) if first == "own" else scale
        # One program at least, which writes the scales.
        (across, down, _), band_bits = tile_grid(max(cdiv(rows, TILE_ROWS), 1), max(cdiv(F, TILE_COLUMNS), 1))
        absent = operands[0]  # the constants keep the kernel from touching it
        _cast(
            (across, down, 1),
            (
                *operands, splits, scale, own, absent if data is None else data,
                absent if transpose is None else transpose, scale_inv, scale if amax is None else amax, T, F, rows,
                groups, band_bits, float(epsilon), unseen,
            ),
            (
                *function, fmt.name == "e5m2", rowwise, columnwise, amax is not None, current, fmt.max, FLT_MAX,
                power_2 and current, first, alignment, power_of_2(groups), TILE_ROWS, TILE_COLUMNS,
                rows % TILE_ROWS == 0 and F % TILE_COLUMNS == 0, rows % 4 == 0, is_wide(rows, 2 * F),
            ),
        )  # fmt: skip
    return [buffer for buffer in (data, transpose, scale_inv) if buffer is not None]


def quantize(
    source: Source,
    splits: Tensor,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None = None,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Compute ``grouped_quantize.quantize`` of a source of ``fused_producers``: a gated activation, or its gradient."""
    return _run(source, splits, scale, fmt, rowwise, columnwise, alignment, amax, False, False, 0.0, unseen)


def quantize_current(
    source: Source,
    splits: Tensor,
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
    """Compute ``grouped_quantize.quantize_current`` likewise: one pass takes the amaxes, another writes the codes."""
    amax = amaxes(source, splits, groups) if amax is None else amax
    how = fmt, rowwise, columnwise, alignment
    buffers = _run(source, splits, amax, *how, None, True, power_2, epsilon)
    return [*buffers, amax] if keep_amax else buffers
