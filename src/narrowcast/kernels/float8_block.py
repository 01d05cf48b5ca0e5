"""FP8 with fp32 scales per 128 elements or per 128 x 128 tile: both directions from one read of a tile."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT, ElementFormat, cdiv, round_up
from .codecs import fp8_code, fp8_word, magnitude, magnitude_of_four, pack_codes, reciprocal, to_float32
from .launch import INTERPRETING, Launcher, check_input, dim_class, is_aligned
from .scaling import OVERFLOW_BY_DTYPE, power_2_scales, scale_from_amax
from .tiles import load_row, store_row, store_transposed, tile_grid, tile_position


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


@triton.jit(
    do_not_specialize=["band_bits"], do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"]
)
def _vector_kernel(
    x_ptr,
    data_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    M,
    K,
    band_bits,
    epsilon,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # Blocks of 128 along K for the row-wise data, along M for the column-wise data: one tile holds both whole.
    BLOCK: tl.constexpr = 128
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * BLOCK
    k0 = tile_k * BLOCK
    if m0 >= M:
        return
    row_scale_stride = (M + 3) // 4 * 4
    column_scale_stride = (K + 3) // 4 * 4
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, BLOCK).to(tl.int32)
    columns_left = tl.minimum(K - k0, BLOCK).to(tl.int32)
    line = tl.arange(0, BLOCK)
    start = m0 * K + k0
    x_tile = x_ptr + start

    if ROWWISE:
        row = line[:, None]
        column = line[None, :]
        offsets = row * K + column
        x = load_row(x_tile, offsets, row, column, rows_left, columns_left, EVEN)
        amax = tl.max(magnitude(x, EMULATE), axis=1)
        scale, scale_inv = _scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EMULATE)
        code = fp8_code(to_float32(x, EMULATE) * tl.expand_dims(scale, 1), E5M2, EMULATE)
        store_row(data_ptr + start, offsets, code, row, column, rows_left, columns_left, EVEN)
        target = row_scale_ptr + (tile_k * row_scale_stride + m0) + line
        if EVEN:
            tl.store(target, scale_inv)
        else:
            # The tile's last lines may be padding of the scale buffer, which holds zeros.
            padded = tl.minimum(row_scale_stride - m0, BLOCK).to(tl.int32)
            tl.store(target, tl.where(line < rows_left, scale_inv, 0.0), mask=line < padded)

    if COLUMNWISE:
        # Read again, from L1: holding the tile across the row-wise part would cost half of the occupancy.
        row = tl.arange(0, BLOCK // 4)[:, None] * 4
        column = line[None, :]
        offsets = row * K + column
        x0 = load_row(x_tile, offsets, row, column, rows_left, columns_left, EVEN)
        x1 = load_row(x_tile + K, offsets, row + 1, column, rows_left, columns_left, EVEN)
        x2 = load_row(x_tile + 2 * K, offsets, row + 2, column, rows_left, columns_left, EVEN)
        x3 = load_row(x_tile + 3 * K, offsets, row + 3, column, rows_left, columns_left, EVEN)
        amax = tl.max(magnitude_of_four(x0, x1, x2, x3, EMULATE), axis=0)
        scale, scale_inv = _scales(amax, epsilon, FP8_MAX, OVERFLOW, POWER_2, EPSILON, EMULATE)
        scale = tl.expand_dims(scale, 0)
        words = fp8_word(
            to_float32(x0, EMULATE) * scale,
            to_float32(x1, EMULATE) * scale,
            to_float32(x2, EMULATE) * scale,
            to_float32(x3, EMULATE) * scale,
            E5M2,
            EMULATE,
        )
        store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)
        target = column_scale_ptr + (tile_m * column_scale_stride + k0) + line
        if EVEN:
            tl.store(target, scale_inv)
        else:
            padded = tl.minimum(column_scale_stride - k0, BLOCK).to(tl.int32)
            tl.store(target, tl.where(line < columns_left, scale_inv, 0.0), mask=line < padded)


@triton.jit(
    do_not_specialize=["band_bits"], do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"]
)
def _tile_kernel(
    x_ptr,
    data_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    M,
    K,
    band_bits,
    epsilon,
    E5M2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # One scale per 128 x 128 tile; the column-wise data are the row-wise codes, transposed.
    BLOCK: tl.constexpr = 128
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * BLOCK
    k0 = tile_k * BLOCK
    if m0 >= M:
        return
    tiles_m = (M + 127) // BLOCK
    tiles_k = (K + 127) // BLOCK
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, BLOCK).to(tl.int32)
    columns_left = tl.minimum(K - k0, BLOCK).to(tl.int32)
    row = tl.arange(0, BLOCK // 4)[:, None] * 4
    column = tl.arange(0, BLOCK)[None, :]
    offsets = row * K + column
    start = m0 * K + k0
    x_tile = x_ptr + start
    x0 = load_row(x_tile, offsets, row, column, rows_left, columns_left, EVEN)
    x1 = load_row(x_tile + K, offsets, row + 1, column, rows_left, columns_left, EVEN)
    x2 = load_row(x_tile + 2 * K, offsets, row + 2, column, rows_left, columns_left, EVEN)
    x3 = load_row(x_tile + 3 * K, offsets, row + 3, column, rows_left, columns_left, EVEN)

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
        data = data_ptr + start
        store_row(data, offsets, c0, row, column, rows_left, columns_left, EVEN)
        store_row(data + K, offsets, c1, row + 1, column, rows_left, columns_left, EVEN)
        store_row(data + 2 * K, offsets, c2, row + 2, column, rows_left, columns_left, EVEN)
        store_row(data + 3 * K, offsets, c3, row + 3, column, rows_left, columns_left, EVEN)
        stride = (tiles_k + 3) // 4 * 4
        padding = (tile_k + pad >= tiles_k) & (tile_k + pad < stride)
        tl.store(row_scale_ptr + (tile_m * stride + tile_k) + pad, padded_scale, mask=(pad == 0) | padding)
    if COLUMNWISE:
        words = pack_codes(c0, c1, c2, c3, EMULATE)
        store_transposed(transpose_ptr, words, m0, k0, M, rows_left, columns_left, WORDS, EVEN)
        stride = (tiles_m + 3) // 4 * 4
        padding = (tile_m + pad >= tiles_m) & (tile_m + pad < stride)
        tl.store(column_scale_ptr + (tile_k * stride + tile_m) + pad, padded_scale, mask=(pad == 0) | padding)


_vector = Launcher(_vector_kernel, num_warps=8)
_tile = Launcher(_tile_kernel, num_warps=8)


def _scale_shapes(M: int, K: int, block_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    blocks_m, blocks_k = cdiv(M, FLOAT8_BLOCK), cdiv(K, FLOAT8_BLOCK)
    alignment = FLOAT8_BLOCK_SCALE_ALIGNMENT
    if block_dim == 2:
        return (blocks_m, round_up(blocks_k, alignment)), (blocks_k, round_up(blocks_m, alignment))
    return (blocks_k, round_up(M, alignment)), (blocks_m, round_up(K, alignment))


def quantize(
    x: Tensor,
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
        x: (*lead, K), rank >= 2, bf16, fp16 or fp32, any strides; M is the product of ``lead``.
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
    check_input(x, 2)
    if block_dim not in (1, 2):
        raise ValueError(f"block_dim is {block_dim}; use 1 (blocks of 128) or 2 (tiles of 128 x 128)")
    x = x.contiguous()
    K = x.shape[-1]
    M = math.prod(x.shape[:-1])
    row_shape, column_shape = _scale_shapes(M, K, block_dim)
    buffers: list[Tensor] = []
    if rowwise:
        buffers.append(torch.empty_like(x, dtype=torch.uint8))
        buffers.append(torch.empty(row_shape, dtype=torch.float32, device=x.device))
    if columnwise:
        buffers.append(torch.empty((K, *x.shape[:-1]), dtype=torch.uint8, device=x.device))
        buffers.append(torch.empty(column_shape, dtype=torch.float32, device=x.device))
    if not buffers or x.numel() == 0:
        return [buffer.zero_() for buffer in buffers]
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    grid, band_bits = tile_grid(cdiv(M, FLOAT8_BLOCK), cdiv(K, FLOAT8_BLOCK))
    launcher = _vector if block_dim == 1 else _tile
    launcher(
        grid,
        (x, *buffers[:2], *buffers[-2:], M, K, band_bits, float(epsilon)),
        (
            fmt.name == "e5m2",
            rowwise,
            columnwise,
            fmt.max,
            OVERFLOW_BY_DTYPE[str(x.dtype)],
            power_2,
            epsilon > 0.0,
            M % FLOAT8_BLOCK == 0 and K % FLOAT8_BLOCK == 0,
            M % 4 == 0,
            max(M, K) >= 2**23,
            INTERPRETING,
        ),
        (x.dtype, is_aligned(x), dim_class(M), dim_class(K)),
    )
    return buffers
