"""MXFP8: E8M0 scales per 32 elements along K and along M, or per 32 x 32 tile, from one read of a tile.

The column-wise data keep the logical orientation, so nothing is transposed. A program is two warps with a tile of
32 x 128, where every lane holds short pieces of many rows: the maxima along both directions need few steps. A tile
fills whole 128-byte lines of both scale buffers' rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import MXFP8_BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, ElementFormat, cdiv, round_up
from .codecs import fp8_code, magnitude, magnitude_of_four, to_float32
from .launch import INTERPRETING, Launcher
from .scaling import e8m0_from_amax, e8m0_reciprocal
from .sources import Source, load_four_rows, source_of, store_column_sums
from .tiles import is_wide, store_row

_GRID_ROWS = 32768  # tile rows along the second grid dimension, which is limited to 65535


@triton.jit
def _spread(values):
    """[R, 4] -> [R, 128], each column repeated 32 times."""
    R: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(values, 2), (R, 4, 32)), (R, 128))


@triton.jit
def _group_amax(size):
    """[R, 128] -> [R, 4], the maxima of 32 columns each."""
    return tl.max(tl.reshape(size, (size.shape[0], 4, 32)), axis=2)


@triton.jit
def _emit_tile(
    x0,
    x1,
    x2,
    x3,
    data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    tile_m,
    k0,
    K,
    rows_left,
    columns_left,
    E5M2: tl.constexpr,
    MAX_RECIPROCAL: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    EVEN: tl.constexpr,
    EMULATE: tl.constexpr,
):
    m0 = tile_m * 32
    row = tl.arange(0, 8)[:, None] * 4
    column = tl.arange(0, 128)[None, :]
    group = tl.arange(0, 4)[None, :]
    offsets = row * K + column
    start = m0 * K + k0
    tiles_k = (K + 127) // 128
    xs = (x0, x1, x2, x3)
    largest = tl.max(magnitude_of_four(x0, x1, x2, x3, EMULATE), axis=0, keep_dims=True)
    if TWO_D:
        tile_code = e8m0_from_amax(tl.maximum(_group_amax(largest), 0.0), MAX_RECIPROCAL)
        column_code = _spread(tile_code)
    else:
        column_code = e8m0_from_amax(tl.maximum(largest, 0.0), MAX_RECIPROCAL)
    for j in tl.static_range(4):
        x = to_float32(xs[j], EMULATE)
        if COLUMNWISE or TWO_D:
            column_data = fp8_code(x * e8m0_reciprocal(column_code), E5M2, EMULATE)
        if COLUMNWISE:
            target = column_data_ptr + start + j * K
            store_row(target, offsets, column_data, row + j, column, rows_left, columns_left, EVEN)
        if ROWWISE:
            if TWO_D:
                row_code = tl.broadcast_to(tile_code, (8, 4))
                data = column_data
            else:
                amax = tl.maximum(_group_amax(magnitude(xs[j], EMULATE)), 0.0)
                row_code = e8m0_from_amax(amax, MAX_RECIPROCAL)
                data = fp8_code(x * _spread(e8m0_reciprocal(row_code)), E5M2, EMULATE)
            store_row(data_ptr + start + j * K, offsets, data, row + j, column, rows_left, columns_left, EVEN)
            row_scale = tl.where(row + j < rows_left, row_code, 0)
            stride = tiles_k * 4
            target = row_scale_ptr + ((m0 + j) * stride + k0 // 32) + (row * stride + group)
            tl.store(target, row_scale.to(tl.uint8))
    if COLUMNWISE:
        column_scale = tl.where(column < columns_left, column_code, 0)
        tl.store(column_scale_ptr + (tile_m * tiles_k * 128 + k0) + column, column_scale.to(tl.uint8))


@triton.jit(do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"])
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
    column_data_ptr,
    column_scale_ptr,
    sums_ptr,
    M,
    K,
    SOURCE: tl.constexpr,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    WIDE: tl.constexpr,
    E5M2: tl.constexpr,
    MAX_RECIPROCAL: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SUMS: tl.constexpr,
    TWO_D: tl.constexpr,
    EVEN: tl.constexpr,
    EMULATE: tl.constexpr,
):
    operands = (operand_0, operand_1, operand_2, operand_3, operand_4, operand_5, operand_6, operand_7)
    # Programs cover the matrix rounded up to 128 x 128, so that they also write the zeros that pad the scales.
    k0 = tl.program_id(0).to(tl.int64) * 128
    tile_m = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    m0 = tile_m * 32
    if m0 >= (M + 127) // 128 * 128:
        return
    if WIDE:
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, 32).to(tl.int32)
    columns_left = tl.minimum(K - k0, 128).to(tl.int32)
    x0, x1, x2, x3, _y0, _y1, _y2, _y3 = load_four_rows(
        operands,
        m0,
        k0,
        K,
        rows_left,
        columns_left,
        32,
        128,
        SOURCE,
        FUNCTION,
        P0,
        P1,
        P2,
        False,
        EVEN,
        EMULATE,
    )
    if SUMS:
        store_column_sums(
            sums_ptr + (tile_m * 2 * K + k0), x0, x1, x2, x3, K, rows_left, columns_left, EMULATE
        )
    _emit_tile(
        x0, x1, x2, x3, data_ptr, row_scale_ptr, column_data_ptr, column_scale_ptr, tile_m, k0, K, rows_left,
        columns_left, E5M2, MAX_RECIPROCAL, ROWWISE, COLUMNWISE, TWO_D, EVEN, EMULATE,
    )  # fmt: skip


_two_warps = Launcher(_quantize_kernel, num_warps=2)
# The bound on registers lets more programs hide the arithmetic's latency.
_two_warps_bounded = Launcher(_quantize_kernel, num_warps=2, maxnreg=96)


def quantize(
    x: Tensor | Source, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Encode with one power-of-two scale per 32 elements, both directions from one read of ``x``.

    Args:
        x: (*lead, K), rank >= 2, bf16, fp16 or fp32, any strides, or a source of it; M is the product of ``lead``.
        fmt: E4M3 or E5M2.
        rowwise: groups of 32 along K.
        columnwise: groups of 32 along M.
        two_d: one scale per 32 x 32 tile, replicated in the scale buffers.

    Returns:
        Row-wise data x.shape and scale_inv (round_up(M, 128), round_up(cdiv(K, 32), 4)), then column-wise data x.shape
        and scale_inv (round_up(cdiv(M, 32), 4), round_up(K, 128)), all uint8.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, or rank below 2.

    Numerics:
        Equal to ``reference.mxfp8.quantize``, byte for byte; scale padding is 0.
    """
    source = source_of(x, 2).within_registers()
    M, K = source.matrix
    shapes: list[tuple[int, ...]] = []
    if rowwise:
        groups = cdiv(K, MXFP8_BLOCK)
        shapes += [source.shape, (round_up(M, SCALE_TILE_ROWS), round_up(groups, SCALE_TILE_COLUMNS))]
    if columnwise:
        groups = cdiv(M, MXFP8_BLOCK)
        shapes += [source.shape, (round_up(groups, SCALE_TILE_COLUMNS), round_up(K, SCALE_TILE_ROWS))]
    buffers = [source.empty(shape, torch.uint8) for shape in shapes]
    if not buffers or M * K == 0:
        return [buffer.zero_() for buffer in buffers]
    sums = source.partial_sums()
    tile_rows = round_up(M, 128) // 32
    launcher = _two_warps_bounded if source.is_activation else _two_warps
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    launcher(
        (cdiv(K, 128), min(tile_rows, _GRID_ROWS), cdiv(tile_rows, _GRID_ROWS)),
        (*source.pointers, *buffers[:2], *buffers[-2:], buffers[0] if sums is None else sums, M, K),
        (
            *source.constants,
            is_wide(M, K),
            fmt.name == "e5m2",
            fmt.max_reciprocal,
            rowwise,
            columnwise,
            sums is not None,
            two_d,
            M % 128 == 0 and K % 128 == 0,
            INTERPRETING,
        ),
    )
    return buffers
