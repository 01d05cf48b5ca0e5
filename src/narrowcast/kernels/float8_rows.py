"""FP8 with one scale per row, or per group of a row's elements: each is read once, or twice if it is long.

``quantize_both`` also scales the columns, for the transposed codes that wgrad and dgrad read: one pass takes the amax
of rows and columns, a second one encodes a tile twice, so that both passes read the tensor once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat, cdiv, round_up
from .codecs import fp8_code, magnitude, pack_codes, product, reciprocal, round_to_dtype, to_float32
from .launch import Launcher, check_input
from .scaling import scale_from_amax
from .tiles import is_wide, load_elements, load_tile, store_tile, store_transposed, tile_grid, tile_position

TILE = 4096
"""Elements of a program's tile."""
LONGEST = 2048
"""The most elements of a row in one tile."""
TRANSPOSED = 64
"""The same where adjacent rows lie beside each other in memory."""
AMAX_TILE = 128
"""Rows and columns of a program that takes the amax of rows and columns."""
TILE_ROWS, TILE_COLUMNS = 64, 128
"""Rows and columns of a program that encodes in both directions."""
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def _scales(
    amax, epsilon, smallest, RULE: tl.constexpr, FP8_MAX: tl.constexpr, RECIPROCAL: tl.constexpr
):  # fmt: skip
    """Return decoding scales, and what elements are multiplied with, or divided by where the rule divides."""
    epsilon = tl.cast(epsilon, tl.float32)  # a graph passes floats in double
    smallest = tl.cast(smallest, tl.float32)
    largest = tl.full(amax.shape, FP8_MAX, tl.float32)
    amax = tl.maximum(tl.maximum(amax, 0.0), epsilon)
    if RULE == "training" or RULE == "training_power_2":
        scale = scale_from_amax(amax, epsilon, FP8_MAX, _FLT_MAX, RULE == "training_power_2")
        return reciprocal(scale), scale
    if RULE == "factors" or RULE == "product":
        scale_inv = product(amax, tl.full(amax.shape, RECIPROCAL, tl.float32))
    elif RULE == "triton":
        scale_inv = amax / FP8_MAX
    else:
        scale_inv = tl.div_rn(amax, largest)
    if RULE == "bfloat16":
        scale_inv = to_float32(round_to_dtype(scale_inv, tl.bfloat16))
    scale_inv = tl.maximum(scale_inv, smallest)
    scale_inv = tl.where(amax == 0.0, tl.where(smallest == 0.0, 1.0, smallest), scale_inv)
    if RULE == "reciprocal":
        return scale_inv, reciprocal(scale_inv)
    if RULE == "factors":
        return scale_inv, tl.where(amax == 0.0, 1.0, tl.div_rn(largest, amax))
    return scale_inv, scale_inv


@triton.jit
def _codes(x, factor, RULE: tl.constexpr, E5M2: tl.constexpr):
    wide = to_float32(x)
    factors = tl.broadcast_to(factor[:, None], wide.shape)
    if RULE == "reciprocal" or RULE == "factors" or RULE == "training" or RULE == "training_power_2":
        scaled = wide * factors
    elif RULE == "triton":
        scaled = wide / factors
    else:
        scaled = tl.div_rn(wide, factors)
    if RULE == "bfloat16":
        scaled = to_float32(round_to_dtype(scaled, tl.bfloat16))
    return fp8_code(scaled, E5M2)


@triton.jit(do_not_specialize=["M"])
def _float8_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    M,
    K,
    x_row,
    x_column,
    padded_rows,
    size,
    epsilon,
    smallest,
    RULE: tl.constexpr,
    E5M2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    start = group * size
    left = tl.minimum(K - start, size)
    index = tl.arange(0, COLUMNS)
    offsets = row[:, None] * K + (start + index)[None, :]
    x_ptr += start.to(tl.int64) * x_column
    x_offsets = row[:, None] * x_row + index.to(tl.int64)[None, :] * x_column
    largest = tl.zeros([ROWS], tl.float32)
    if ONCE:
        inside = (row < M)[:, None] & (index < left)[None, :]
        x = tl.load(x_ptr + x_offsets, mask=inside, other=0.0)
        largest = tl.max(magnitude(x), axis=1)
    else:
        for at in tl.range(0, size, COLUMNS):  # long groups are whole rows
            inside = (row < M)[:, None] & (index < left - at)[None, :]
            part = tl.load(x_ptr + x_offsets + at * x_column, mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.max(magnitude(part), axis=1))
    scale_inv, factor = _scales(largest, epsilon, smallest, RULE, FP8_MAX, RECIPROCAL)
    # the scales of rows that are not there are the padding of the buffer
    target = scale_ptr + group.to(tl.int64) * padded_rows + row
    tl.store(target, tl.where(row < M, scale_inv, 0.0), mask=row < padded_rows)
    if ONCE:
        inside = (row < M)[:, None] & (index < left)[None, :]
        tl.store(codes_ptr + offsets, _codes(x, factor, RULE, E5M2), mask=inside)
    else:
        for at in tl.range(0, size, COLUMNS):  # long groups are whole rows
            inside = (row < M)[:, None] & (index < left - at)[None, :]
            part = tl.load(x_ptr + x_offsets + at * x_column, mask=inside, other=0.0)
            tl.store(codes_ptr + offsets + at, _codes(part, factor, RULE, E5M2), mask=inside)


_quantize = Launcher(_float8_rows_kernel, num_warps=4)


def quantize(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rule: str,
    epsilon: float = 0.0,
    smallest: float = 0.0,
    group: int = 0,
    alignment: int = 1,
) -> list[Tensor]:
    """Compute ``reference.float8_rows.quantize``.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernel cannot reach, or rank below 2.
    """
    check_input(x, 2)
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    transposed = x.dim() == 2 and x.stride(0) == 1 and not x.is_contiguous()
    x = x if transposed else x.contiguous()
    strides = (1, x.stride(1)) if transposed else (K, 1)
    size = group or max(K, 1)
    groups, padded_rows = cdiv(K, size) if group else 1, round_up(M, alignment)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty((groups, padded_rows), dtype=torch.float32, device=x.device)
    if scale_inv.numel():
        columns = min(triton.next_power_of_2(size), TRANSPOSED if transposed else LONGEST)
        rows = TILE // columns
        _quantize(
            (cdiv(padded_rows, rows), groups, 1),
            (x, codes, scale_inv, M, K, *strides, padded_rows, size, epsilon, smallest),
            (
                rule, fmt.name == "e5m2", fmt.max, fmt.max_reciprocal, size <= columns, rows, columns,
            ),
        )  # fmt: skip
    return [codes, scale_inv]


@triton.jit
def _raise(amax_ptr, values, inside):
    """Raise amaxes to ``values``; non-negative floats order like their bits, so an integer maximum serves."""
    values = tl.maximum(values, 0.0)  # a maximum over nothing but NaN is NaN
    tl.atomic_max(
        amax_ptr.to(tl.pointer_type(tl.int32)), values.to(tl.int32, bitcast=True), mask=inside, sem="relaxed"
    )


@triton.jit
def _amax_of_rows_and_columns_kernel(
    x_ptr,
    amax_ptr,
    M,
    K,
    band_bits,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Raise the amaxes of M rows, and those of K columns after them."""
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    row = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    inside_rows = row < M - m0
    inside_columns = column < K - k0
    offsets = row.to(tl.int64)[:, None] * K + column[None, :]
    inside = inside_rows[:, None] & inside_columns[None, :]
    size = magnitude(load_elements(x_ptr + (m0 * K + k0) + offsets, inside, EVEN))
    _raise(amax_ptr + m0 + row, tl.max(size, axis=1), inside_rows)
    _raise(amax_ptr + M + k0 + column, tl.max(size, axis=0), inside_columns)


@triton.jit
def _float8_both_kernel(
    x_ptr,
    amax_ptr,
    codes_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    M,
    K,
    band_bits,
    epsilon,
    RULE: tl.constexpr,
    E5M2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    # the pass before ends at the last tiles, so what L2 still holds is there: start there
    tile_m, tile_k = tile_position(band_bits, True)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    group = tl.arange(0, TILE_ROWS // 4) * 4
    column = tl.arange(0, TILE_COLUMNS)
    offsets = group[:, None] * K + column[None, :]
    xs = load_tile(
        x_ptr + (m0 * K + k0), offsets, group[:, None], column[None, :], K, rows_left, columns_left, EVEN
    )
    below = tl.load(amax_ptr + M + k0 + column, mask=column < columns_left, other=0.0)
    column_inv, column_scale = _scales(below, epsilon, 0.0, RULE, FP8_MAX, RECIPROCAL)
    if tile_m == 0:
        tl.store(column_scale_ptr + k0 + column, column_inv, mask=column < columns_left)
    codes = ()
    transposed = ()
    for j in tl.static_range(4):
        beside = tl.load(amax_ptr + m0 + group + j, mask=group + j < rows_left, other=0.0)
        row_inv, row_scale = _scales(beside, epsilon, 0.0, RULE, FP8_MAX, RECIPROCAL)
        if tile_k == 0:
            tl.store(row_scale_ptr + m0 + group + j, row_inv, mask=group + j < rows_left)
        wide = to_float32(xs[j])
        codes = codes + (fp8_code(wide * row_scale[:, None], E5M2),)
        transposed = transposed + (fp8_code(wide * column_scale[None, :], E5M2),)
    store_tile(
        codes_ptr + (m0 * K + k0),
        offsets,
        codes,
        group[:, None],
        column[None, :],
        K,
        rows_left,
        columns_left,
        EVEN,
    )
    words = pack_codes(*transposed)
    store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)


_take_amaxes = Launcher(_amax_of_rows_and_columns_kernel, num_warps=8)
_quantize_both = Launcher(_float8_both_kernel, num_warps=8)


def quantize_both(x: Tensor, fmt: ElementFormat, *, rule: str, epsilon: float = 0.0) -> list[Tensor]:
    """Compute ``reference.float8_rows.quantize_both``.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernel cannot reach, or rank below 2.
    """
    check_input(x, 2)
    x = x.contiguous()
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    if not x.numel():
        parts = (quantize(part, fmt, rule=rule, epsilon=epsilon) for part in (x, x.view(M, K).t()))
        return [buffer for part in parts for buffer in part]
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    transposed = torch.empty((K, M), dtype=torch.uint8, device=x.device)
    of_rows = torch.empty((1, M), dtype=torch.float32, device=x.device)
    of_columns = torch.empty((1, K), dtype=torch.float32, device=x.device)
    amax = torch.zeros(M + K, dtype=torch.float32, device=x.device)
    grid, band_bits = tile_grid(cdiv(M, AMAX_TILE), cdiv(K, AMAX_TILE))
    even = M % AMAX_TILE == 0 and K % AMAX_TILE == 0
    _take_amaxes(grid, (x, amax, M, K, band_bits), (AMAX_TILE, AMAX_TILE, even))
    grid, band_bits = tile_grid(cdiv(M, TILE_ROWS), cdiv(K, TILE_COLUMNS))
    even = M % TILE_ROWS == 0 and K % TILE_COLUMNS == 0
    _quantize_both(
        grid,
        (x, amax, codes, of_rows, transposed, of_columns, M, K, band_bits, epsilon),
        (
            rule, fmt.name == "e5m2", fmt.max, fmt.max_reciprocal, TILE_ROWS, TILE_COLUMNS, even, M % 4 == 0,
            is_wide(M, K),
        ),
    )  # fmt: skip
    return [codes, of_rows, transposed, of_columns]
