"""FP8 with fp32 scales per 128 elements or per 128 x 128 tile: both directions from one read of a tile."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_1D,
    FLOAT8_BLOCK_2D,
    FLOAT8_FORMATS,
    ElementFormat,
    cdiv,
)
from .codecs import (
    fp8_code,
    fp8_codes,
    fp8_word,
    magnitude,
    magnitude_of_four,
    pack_codes,
    reciprocal,
    to_float32,
)
from .fused_producers import ACTIVATIONS, Source, load_four_rows, pairs_tiles, source_of, store_column_sums
from .launch import (
    TENSOR,
    Launch,
    Launcher,
    NotCompiledError,
    beside,
    contiguous,
    for_hopper,
    is_traced,
    remembered,
)
from .scaling import OVERFLOW_BY_DTYPE, power_2_scales, scale_from_amax
from .tiles import is_wide, store_row, store_tile, store_transposed, tile_grid, tile_position

_BLOCK = tl.constexpr(FLOAT8_BLOCK)


@triton.jit
def block_scales(
    amax,
    epsilon,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Return encoding scales and their rounded reciprocals."""
    amax = tl.maximum(amax, 0.0)
    if POWER_2:
        return power_2_scales(amax, epsilon, FP8_MAX, OVERFLOW, EPSILON)
    scale = scale_from_amax(amax, epsilon, FP8_MAX, OVERFLOW, False)
    return scale, reciprocal(scale)


@triton.jit
def _store_scales(scale_ptr, scale_inv, line, block, start, lines, left, EVEN: tl.constexpr):
    """Store scales of the lines of a tile from ``start`` on, of which as many are there as are ``left``."""
    stride = (lines + 3) // 4 * 4
    target = scale_ptr + (block * stride + start) + line
    if EVEN:
        tl.store(target, scale_inv)
    else:
        # The tile's last lines may be padding of the scale buffer, which holds zeros.
        padded = tl.minimum(stride - start, _BLOCK).to(tl.int32)
        tl.store(target, tl.where(line < left, scale_inv, 0.0), mask=line < padded)


@triton.jit
def _store_tile_scale(scale_ptr, scales, pad, row, place, lines):
    """Store the scale of a tile; tiles near the end of a row of scales also write the zeros that pad it."""
    tiles = (lines + 127) // _BLOCK
    stride = (tiles + 3) // 4 * 4
    padding = (place + pad >= tiles) & (place + pad < stride)
    tl.store(scale_ptr + (row * stride + place) + pad, scales, mask=(pad == 0) | padding)


@triton.jit
def _emit_tile(
    xs,
    epsilon,
    data_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    tile_m,
    k0,
    M,
    K,
    rows_left,
    columns_left,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Encode a tile and store it: with one scale (``SQUARE``), or with a scale per row, and per column for the columns.

    Blocks are 128 long, so one tile holds them whole in both directions.
    """
    m0 = tile_m * _BLOCK
    tile_k = k0 // _BLOCK
    row = tl.arange(0, _BLOCK // 4)[:, None] * 4
    column = tl.arange(0, _BLOCK)[None, :]
    if SQUARE:
        size = magnitude_of_four(*xs)
        amax = tl.max(tl.max(size, axis=1, keep_dims=True), axis=0, keep_dims=True)
        scale, scale_inv = block_scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON)
        codes = fp8_codes(xs, scale, E5M2, True)
        pad = tl.arange(0, 4)[None, :]
        padded_scale = tl.where(pad == 0, scale_inv, 0.0)
        if ROWWISE:
            offsets = row * K + column
            data = data_ptr + (m0 * K + k0)
            store_tile(data, offsets, codes, row, column, K, rows_left, columns_left, EVEN)
            _store_tile_scale(row_scale_ptr, padded_scale, pad, tile_m, tile_k, K)
        if COLUMNWISE:  # the same codes, transposed
            words = pack_codes(*codes)
            store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)
            _store_tile_scale(column_scale_ptr, padded_scale, pad, tile_k, tile_m, M)
    else:
        if COLUMNWISE:
            amax = tl.max(magnitude_of_four(*xs), axis=0, keep_dims=True)
            scale, scale_inv = block_scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON)
            scaled = ()
            for j in tl.static_range(4):
                scaled = scaled + (to_float32(xs[j]) * scale,)
            words = fp8_word(*scaled, E5M2)
            _store_scales(column_scale_ptr, scale_inv, column, tile_m, k0, K, columns_left, EVEN)
        if ROWWISE:
            offsets = row * K + column
            data = data_ptr + (m0 * K + k0)
            inverses = ()
            for j in tl.static_range(4):
                amax = tl.max(magnitude(xs[j]), axis=1, keep_dims=True)
                scale, scale_inv = block_scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON)
                code = fp8_code(to_float32(xs[j]) * scale, E5M2)
                store_row(data + j * K, offsets, code, row + j, column, rows_left, columns_left, EVEN)
                inverses = inverses + (tl.reshape(scale_inv, [_BLOCK // 4]),)
            # Those of consecutive rows side by side: one store of all.
            even, odd = tl.join(inverses[0], inverses[2]), tl.join(inverses[1], inverses[3])
            scale_inv = tl.reshape(tl.join(even, odd), [_BLOCK])
            line = tl.arange(0, _BLOCK)
            _store_scales(row_scale_ptr, scale_inv, line, tile_k, m0, M, rows_left, EVEN)
        if COLUMNWISE:
            # Last, so that the tile's registers are free for the exchange between threads.
            store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)


@triton.jit(
    do_not_specialize=["band_bits"], do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"]
)
def _float8_block_quantize_kernel(
    operand_0,
    operand_1,
    operand_2,
    operand_3,
    operand_4,
    operand_5,
    operand_6,
    operand_7,
    data_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    sums_ptr,
    M,
    K,
    band_bits,
    epsilon,
    SQUARE: tl.constexpr,
    SUMS: tl.constexpr,
    SOURCE: tl.constexpr,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE: tl.constexpr,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):
    operands = (operand_0, operand_1, operand_2, operand_3, operand_4, operand_5, operand_6, operand_7)
    # The statistics of a norm come from a pass over all rows; the last ones are still in L2: start there.
    REVERSE: tl.constexpr = SOURCE == "norm" or SOURCE == "norm_backward"
    tile_m, tile_k = tile_position(band_bits, REVERSE)
    m0 = tile_m * _BLOCK
    k0 = tile_k * _BLOCK
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    width = K // 2 if PAIRED else K
    rows_left = tl.minimum(M - m0, _BLOCK).to(tl.int32)
    columns_left = tl.minimum(width - k0, _BLOCK).to(tl.int32)
    xs, ys = load_four_rows(
        operands, m0, k0, K, rows_left, columns_left, _BLOCK, _BLOCK, SOURCE, FUNCTION, P0, P1, P2, PAIRED, EVEN,
    )  # fmt: skip
    if SUMS:
        sums = sums_ptr + (m0 // 16 * K + k0)
        store_column_sums(sums, xs, K, rows_left, columns_left)
        if PAIRED:
            store_column_sums(sums + width, ys, K, rows_left, columns_left)
    _emit_tile(
        xs, epsilon, data_ptr, row_scale_ptr, transpose_ptr, column_scale_ptr, tile_m, k0, M, K, rows_left,
        columns_left, SQUARE, E5M2, ROWWISE, COLUMNWISE, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EVEN, WORDS,
    )  # fmt: skip
    if PAIRED:
        _emit_tile(
            ys, epsilon, data_ptr, row_scale_ptr, transpose_ptr, column_scale_ptr, tile_m, width + k0, M, K, rows_left,
            columns_left, SQUARE, E5M2, ROWWISE, COLUMNWISE, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EVEN, WORDS,
        )  # fmt: skip


# A thread holds its part of the tile across both directions: few warps with many registers are fastest, unless
# computing the tile takes many registers too.
_four_warps = Launcher(_float8_block_quantize_kernel, num_warps=4)
_eight_warps = Launcher(_float8_block_quantize_kernel, num_warps=8)
# Both halves of a gated activation's gradient: two programs at once on a multiprocessor are fastest, though a few
# registers spill. The compiler of a graph takes no limit; there more warps are.
_paired = Launcher(_float8_block_quantize_kernel, num_warps=8, maxnreg=128)
_paired_in_graph = Launcher(_float8_block_quantize_kernel, num_warps=16)


@remembered
def _launch(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    constants: tuple[Any, ...],
    operands: int,
    sums: bool,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    block_dim: int,
    power_2: bool,
    epsilon: float,
    traced: bool,
    hopper: ModuleType | None,
) -> tuple[Launch | None, list[Any]]:
    """Return (the launch, None if there is nothing to do; shape, strides and dtype of each buffer).

    ``hopper``: ``gated_hopper``, if that may have a launch.
    """
    M, K = math.prod(shape[:-1]), shape[-1]
    described = (FLOAT8_BLOCK_2D if block_dim == 2 else FLOAT8_BLOCK_1D).describe(shape, rowwise, columnwise)
    layouts = [(*contiguous(size), getattr(torch, kind)) for size, kind in described.values()]
    if not layouts or M * K == 0:
        return None, layouts
    if hopper is not None:
        faster = hopper.launch(
            shape, dtype, constants, sums, fmt, rowwise, columnwise, block_dim, power_2, epsilon
        )
        if faster is not None:
            return faster, layouts
    paired = pairs_tiles(constants, K, FLOAT8_BLOCK)
    grid, band_bits = tile_grid(cdiv(M, FLOAT8_BLOCK), cdiv(K // 2 if paired else K, FLOAT8_BLOCK))
    if paired:
        launcher = _paired_in_graph if traced else _paired
    else:
        launcher = _four_warps if block_dim == 1 and constants[0] not in ACTIVATIONS else _eight_warps
    arguments = [
        *[TENSOR] * operands, *[None] * (8 - operands), *[TENSOR] * 5, M, K, band_bits, epsilon,
    ]  # fmt: skip
    options = (
        block_dim == 2, sums, *constants, paired, is_wide(M, K), fmt == "e5m2", rowwise, columnwise,
        FLOAT8_FORMATS[fmt].max, OVERFLOW_BY_DTYPE[str(dtype)], power_2, epsilon > 0.0,
        M % FLOAT8_BLOCK == 0 and K % FLOAT8_BLOCK == 0, M % 4 == 0,
    )  # fmt: skip
    return Launch(launcher, grid, arguments, options), layouts


def quantize(
    x: Tensor | Source,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    block_dim: int,
    power_2: bool,
    epsilon: float,
) -> list[Tensor]:
    """Compute ``reference.float8_block.quantize``, both directions from one read of ``x``: any tensor, or a source of
    one.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernels cannot reach, rank below 2, or another ``block_dim``.
    """
    if block_dim not in (1, 2):
        raise ValueError(f"block_dim is {block_dim}; use 1 (blocks of 128) or 2 (tiles of 128 x 128)")
    source = source_of(x, 2)
    if not (source.is_tensor or pairs_tiles(source.constants, source.shape[-1], FLOAT8_BLOCK)):
        source = source.within_registers()
    operands = source.operands
    like, sums = operands[0], source.column_sums is not None
    traced = is_traced(like)
    gated = source.constants[0] in ("gated", "gated_backward") and not traced
    hopper = for_hopper("gated_hopper", like.device) if gated else None
    launch, layouts = _launch(
        like, source.shape, source.dtype, source.constants, len(operands), sums, fmt.name, rowwise, columnwise,
        block_dim, power_2, float(epsilon), traced, hopper,
    )  # fmt: skip
    new = beside(like)
    buffers = [*source.out] if source.out is not None else [new(*layout) for layout in layouts]
    if launch is None:
        return [buffer.zero_() for buffer in buffers]
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    pointers = (*buffers[:2], *buffers[-2:], source.partial_sums() if sums else buffers[0])
    try:
        launch([*operands, *pointers])  # type: ignore[list-item]
    except NotCompiledError:  # nothing ran, and ``for_hopper`` has no module any more
        return quantize(
            x,
            fmt,
            rowwise=rowwise,
            columnwise=columnwise,
            block_dim=block_dim,
            power_2=power_2,
            epsilon=epsilon,
        )
    return buffers
