"""FP8 with fp32 scales per 128 elements or per 128 x 128 tile: both directions from one read of a tile."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_SCALE_ALIGNMENT,
    FLOAT8_FORMATS,
    ElementFormat,
    cdiv,
    round_up,
)
from .codecs import fp8_code, fp8_word, magnitude, magnitude_of_four, pack_codes, reciprocal, to_float32
from .launch import INTERPRETING, PLAIN, TENSOR, Launch, Launcher, beside, contiguous, for_hopper, is_traced
from .scaling import OVERFLOW_BY_DTYPE, power_2_scales, scale_from_amax
from .sources import ACTIVATIONS, Source, load_four_rows, pairs_tiles, source_of, store_column_sums
from .tiles import is_wide, store_row, store_transposed, tile_grid, tile_position

_BLOCK = tl.constexpr(FLOAT8_BLOCK)


@triton.jit
def _scales(
    amax,
    epsilon,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Encoding scales and their rounded reciprocals."""
    amax = tl.maximum(amax, 0.0)
    if POWER_2:
        return power_2_scales(amax, epsilon, FP8_MAX, OVERFLOW, EPSILON)
    scale = scale_from_amax(amax, epsilon, FP8_MAX, OVERFLOW, False)
    return scale, reciprocal(scale, EMULATE)


@triton.jit
def _emit_vectors(
    x0,
    x1,
    x2,
    x3,
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
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Blocks of 128 along K for the row-wise data, along M for the column-wise data: one tile holds both whole."""
    m0 = tile_m * _BLOCK
    tile_k = k0 // _BLOCK
    row = tl.arange(0, _BLOCK // 4)[:, None] * 4
    column = tl.arange(0, _BLOCK)[None, :]
    if COLUMNWISE:
        amax = tl.max(magnitude_of_four(x0, x1, x2, x3, EMULATE), axis=0, keep_dims=True)
        scale, scale_inv = _scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EMULATE)
        words = fp8_word(
            to_float32(x0, EMULATE) * scale,
            to_float32(x1, EMULATE) * scale,
            to_float32(x2, EMULATE) * scale,
            to_float32(x3, EMULATE) * scale,
            E5M2,
            EMULATE,
        )
        stride = (K + 3) // 4 * 4
        target = column_scale_ptr + (tile_m * stride + k0) + column
        if EVEN:
            tl.store(target, scale_inv)
        else:
            # The tile's last lines may be padding of the scale buffer, which holds zeros.
            padded = tl.minimum(stride - k0, _BLOCK).to(tl.int32)
            tl.store(target, tl.where(column < columns_left, scale_inv, 0.0), mask=column < padded)
    if ROWWISE:
        offsets = row * K + column
        data = data_ptr + (m0 * K + k0)
        xs = (x0, x1, x2, x3)
        inverses = ()
        for j in tl.static_range(4):
            amax = tl.max(magnitude(xs[j], EMULATE), axis=1, keep_dims=True)
            scale, scale_inv = _scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EMULATE)
            code = fp8_code(to_float32(xs[j], EMULATE) * scale, E5M2, EMULATE)
            store_row(data + j * K, offsets, code, row + j, column, rows_left, columns_left, EVEN)
            inverses = inverses + (tl.reshape(scale_inv, [_BLOCK // 4]),)
        # Those of consecutive rows side by side: one store of all.
        even, odd = tl.join(inverses[0], inverses[2]), tl.join(inverses[1], inverses[3])
        scale_inv = tl.reshape(tl.join(even, odd), [_BLOCK])
        line = tl.arange(0, _BLOCK)
        stride = (M + 3) // 4 * 4
        scales = row_scale_ptr + (tile_k * stride + m0) + line
        if EVEN:
            tl.store(scales, scale_inv)
        else:
            padded = tl.minimum(stride - m0, _BLOCK).to(tl.int32)
            tl.store(scales, tl.where(line < rows_left, scale_inv, 0.0), mask=line < padded)
    if COLUMNWISE:
        # Last, so that the tile's registers are free for the exchange between threads.
        store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)


@triton.jit
def _emit_square(
    x0,
    x1,
    x2,
    x3,
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
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One scale for the whole tile; the column-wise data are the row-wise codes, transposed."""
    m0 = tile_m * _BLOCK
    tile_k = k0 // _BLOCK
    row = tl.arange(0, _BLOCK // 4)[:, None] * 4
    column = tl.arange(0, _BLOCK)[None, :]
    size = magnitude_of_four(x0, x1, x2, x3, EMULATE)
    amax = tl.max(tl.max(size, axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale, scale_inv = _scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EMULATE)
    c0 = fp8_code(to_float32(x0, EMULATE) * scale, E5M2, EMULATE)
    c1 = fp8_code(to_float32(x1, EMULATE) * scale, E5M2, EMULATE)
    c2 = fp8_code(to_float32(x2, EMULATE) * scale, E5M2, EMULATE)
    c3 = fp8_code(to_float32(x3, EMULATE) * scale, E5M2, EMULATE)
    # Tiles near the end of a row of scales also write the zeros that pad it to a multiple of 4.
    pad = tl.arange(0, 4)[None, :]
    padded_scale = tl.where(pad == 0, scale_inv, 0.0)
    if ROWWISE:
        offsets = row * K + column
        data = data_ptr + (m0 * K + k0)
        store_row(data, offsets, c0, row, column, rows_left, columns_left, EVEN)
        store_row(data + K, offsets, c1, row + 1, column, rows_left, columns_left, EVEN)
        store_row(data + 2 * K, offsets, c2, row + 2, column, rows_left, columns_left, EVEN)
        store_row(data + 3 * K, offsets, c3, row + 3, column, rows_left, columns_left, EVEN)
        tiles_k = (K + 127) // _BLOCK
        stride = (tiles_k + 3) // 4 * 4
        padding = (tile_k + pad >= tiles_k) & (tile_k + pad < stride)
        tl.store(row_scale_ptr + (tile_m * stride + tile_k) + pad, padded_scale, mask=(pad == 0) | padding)
    if COLUMNWISE:
        words = pack_codes(c0, c1, c2, c3, EMULATE)
        store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)
        tiles_m = (M + 127) // _BLOCK
        stride = (tiles_m + 3) // 4 * 4
        padding = (tile_m + pad >= tiles_m) & (tile_m + pad < stride)
        tl.store(column_scale_ptr + (tile_k * stride + tile_m) + pad, padded_scale, mask=(pad == 0) | padding)


@triton.jit(
    do_not_specialize=["band_bits"], do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"]
)
def _quantize_kernel(
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
    EMULATE: tl.constexpr,
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
    x0, x1, x2, x3, y0, y1, y2, y3 = load_four_rows(
        operands, m0, k0, K, rows_left, columns_left, _BLOCK, _BLOCK, SOURCE, FUNCTION, P0, P1, P2, PAIRED, EVEN,
        EMULATE,
    )  # fmt: skip
    emit: tl.constexpr = _emit_square if SQUARE else _emit_vectors
    if SUMS:
        sums = sums_ptr + (m0 // 16 * K + k0)
        store_column_sums(sums, x0, x1, x2, x3, K, rows_left, columns_left, EMULATE)
        if PAIRED:
            store_column_sums(sums + width, y0, y1, y2, y3, K, rows_left, columns_left, EMULATE)
    emit(
        x0, x1, x2, x3, epsilon, data_ptr, row_scale_ptr, transpose_ptr, column_scale_ptr, tile_m, k0, M, K,
        rows_left, columns_left, E5M2, ROWWISE, COLUMNWISE, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EVEN, WORDS, EMULATE,
    )  # fmt: skip
    if PAIRED:
        emit(
            y0, y1, y2, y3, epsilon, data_ptr, row_scale_ptr, transpose_ptr, column_scale_ptr, tile_m, width + k0, M,
            K, rows_left, columns_left, E5M2, ROWWISE, COLUMNWISE, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EVEN, WORDS,
            EMULATE,
        )  # fmt: skip


# A thread holds its part of the tile across both directions: few warps with many registers are fastest, unless
# computing the tile takes many registers too.
_four_warps = Launcher(_quantize_kernel, num_warps=4)
_eight_warps = Launcher(_quantize_kernel, num_warps=8)
# Both halves of a gated activation's gradient: two programs at once on a multiprocessor are fastest, though a few
# registers spill. The compiler of a graph takes no limit; there more warps are.
_paired = Launcher(_quantize_kernel, num_warps=8, maxnreg=128)
_paired_in_graph = Launcher(_quantize_kernel, num_warps=16)


def _scale_shapes(M: int, K: int, block_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    blocks_m, blocks_k = cdiv(M, FLOAT8_BLOCK), cdiv(K, FLOAT8_BLOCK)
    alignment = FLOAT8_BLOCK_SCALE_ALIGNMENT
    if block_dim == 2:
        return (blocks_m, round_up(blocks_k, alignment)), (blocks_k, round_up(blocks_m, alignment))
    return (blocks_k, round_up(M, alignment)), (blocks_m, round_up(K, alignment))


@functools.lru_cache(maxsize=1024)
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
    """(the launch, None where there is nothing to do; shape, strides and dtype of each buffer).

    ``hopper``: ``gated_hopper``, if that may have a launch.
    """
    M, K = math.prod(shape[:-1]), shape[-1]
    row_shape, column_shape = _scale_shapes(M, K, block_dim)
    layouts = []
    if rowwise:
        layouts += [(*contiguous(shape), torch.uint8), (*contiguous(row_shape), torch.float32)]
    if columnwise:
        codes = (*contiguous((K, *shape[:-1])), torch.uint8)
        layouts += [codes, (*contiguous(column_shape), torch.float32)]
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
        M % FLOAT8_BLOCK == 0 and K % FLOAT8_BLOCK == 0, M % 4 == 0, INTERPRETING,
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
    """Encode in blocks of 128 or tiles of 128 x 128, both directions from one read of ``x``.

    Args:
        x: (*lead, K), rank >= 2, bf16, fp16 or fp32, any strides, or a source of it; M is the product of ``lead``.
        fmt: E4M3 or E5M2.
        rowwise: blocks along K.
        columnwise: blocks along M.
        block_dim: 1 for blocks of 128 elements, 2 for tiles of 128 x 128.
        power_2: round scales down to powers of two.
        epsilon: lower bound of a block's amax.

    Returns:
        Row-wise data (*lead, K) and scale_inv, then column-wise data (K, *lead) and scale_inv; shapes of the scales
        as ``reference.float8_block.quantize`` gives them.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, rank below 2, or another ``block_dim``.

    Numerics:
        Equal to ``reference.float8_block.quantize``, byte for byte.
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
    # the sizes of a trace may be symbols, which nothing remembers
    launch_of = _launch if type(like) in PLAIN else _launch.__wrapped__
    launch, layouts = launch_of(
        source.shape, source.dtype, source.constants, len(operands), sums, fmt.name, rowwise, columnwise, block_dim,
        power_2, float(epsilon), traced, hopper,
    )  # fmt: skip
    new = beside(like)
    buffers = [new(*layout) for layout in layouts]
    if launch is None:
        return [buffer.zero_() for buffer in buffers]
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    pointers = (*buffers[:2], *buffers[-2:], source.partial_sums() if sums else buffers[0])
    launch([*operands, *pointers])  # type: ignore[list-item]
    return buffers
