"""The MX formats: E8M0 scales per 32 elements along K and along M, or per 32 x 32 tile, from one read of a tile.

A program is two warps with a tile of 32 x 128, where every lane holds short pieces of many rows: the maxima along both
directions need few steps. The tile arrives as four tensors of every fourth row. Codes of eight bits keep the logical
orientation in both directions, so nothing is transposed, and a tile fills whole 128-byte lines of both scale buffers'
rows. Codes of six or four bits are packed four at a time, into three or two bytes: along a row, four neighbors of one
tensor; along a column, one from each of the four tensors, which is why the packed columns cost no exchange.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import MX_LAYOUTS, ElementFormat, cdiv, round_up
from .codecs import (
    decode_subbyte,
    encode_by_bits,
    fp8_code,
    magnitude,
    magnitude_of_four,
    repeat_columns,
    round_to_dtype,
    to_float32,
)
from .fused_producers import Source, load_four_rows, source_of, store_column_sums
from .launch import Launcher, check_codes
from .scaling import e8m0_from_amax, e8m0_reciprocal, e8m0_value
from .tiles import is_wide, store_row, tile_grid, tile_position

_GRID_ROWS = 32768  # tile rows along the second grid dimension, which is limited to 65535


@triton.jit
def _group_amax(size):
    """[R, 128] -> [R, 4], the maxima of 32 columns each."""
    return tl.max(tl.reshape(size, (size.shape[0], 4, 32)), axis=2)


@triton.jit
def _emit_tile(
    xs,
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
):
    m0 = tile_m * 32
    row = tl.arange(0, 8)[:, None] * 4
    column = tl.arange(0, 128)[None, :]
    group = tl.arange(0, 4)[None, :]
    offsets = row * K + column
    start = m0 * K + k0
    tiles_k = (K + 127) // 128
    largest = tl.max(magnitude_of_four(*xs), axis=0, keep_dims=True)
    if TWO_D:
        tile_code = e8m0_from_amax(tl.maximum(_group_amax(largest), 0.0), MAX_RECIPROCAL)
        column_code = repeat_columns(tile_code, 32)
    else:
        column_code = e8m0_from_amax(tl.maximum(largest, 0.0), MAX_RECIPROCAL)
    for j in tl.static_range(4):
        x = to_float32(xs[j])
        if COLUMNWISE or TWO_D:
            column_data = fp8_code(x * e8m0_reciprocal(column_code), E5M2)
        if COLUMNWISE:
            target = column_data_ptr + start + j * K
            store_row(target, offsets, column_data, row + j, column, rows_left, columns_left, EVEN)
        if ROWWISE:
            if TWO_D:
                row_code = tl.broadcast_to(tile_code, (8, 4))
                data = column_data
            else:
                amax = tl.maximum(_group_amax(magnitude(xs[j])), 0.0)
                row_code = e8m0_from_amax(amax, MAX_RECIPROCAL)
                data = fp8_code(x * repeat_columns(e8m0_reciprocal(row_code), 32), E5M2)
            store_row(data_ptr + start + j * K, offsets, data, row + j, column, rows_left, columns_left, EVEN)
            row_scale = tl.where(row + j < rows_left, row_code, 0)
            stride = tiles_k * 4
            target = row_scale_ptr + ((m0 + j) * stride + k0 // 32) + (row * stride + group)
            tl.store(target, row_scale.to(tl.uint8))
    if COLUMNWISE:
        column_scale = tl.where(column < columns_left, column_code, 0)
        tl.store(column_scale_ptr + (tile_m * tiles_k * 128 + k0) + column, column_scale.to(tl.uint8))


@triton.jit
def _poisoned_code(size, MAX_RECIPROCAL: tl.constexpr):
    """Return E8M0 codes of amaxes given as the bits of fp32 magnitudes, among which any NaN is the largest; NaN gives
    255.
    """
    code = e8m0_from_amax(tl.minimum(size, 0x7F800000).to(tl.float32, bitcast=True), MAX_RECIPROCAL)
    return tl.where(size > 0x7F800000, 255, code)


@triton.jit
def _poisoned_reciprocal(code):
    """Return ``2**(127 - code)`` as fp32, NaN for code 255."""
    return tl.where(code == 255, float("nan"), e8m0_reciprocal(code))


@triton.jit
def _emit_packed_tile(
    xs,
    data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    tile_m,
    k0,
    M,
    K,
    rows_left,
    columns_left,
    BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_RECIPROCAL: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
):
    MAX_CODE: tl.constexpr = (1 << (BITS - 1)) - 1
    BYTES: tl.constexpr = BITS // 2  # bytes of four codes
    m0 = tile_m * 32
    row = tl.arange(0, 8)[:, None] * 4
    column = tl.arange(0, 128)[None, :]
    group = tl.arange(0, 4)[None, :]
    word = tl.arange(0, 32)[None, :]
    place = tl.arange(0, 4)[None, None, :] * BITS
    row_bytes = (K + 31) // 32 * (4 * BITS)
    rows = M + m0 * 0  # as a 64-bit integer
    column_bytes = (rows + 31) // 32 * (4 * BITS)
    tiles_k = (K + 127) // 128
    tiles_m = (rows + 127) // 128
    largest = tl.zeros((8, 128), tl.int32)
    for j in tl.static_range(4):
        largest = tl.maximum(largest, to_float32(xs[j]).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(largest, axis=0, keep_dims=True)
    if TWO_D:
        tile_code = _poisoned_code(_group_amax(largest), MAX_RECIPROCAL)
        column_code = repeat_columns(tile_code, 32)
    else:
        column_code = _poisoned_code(largest, MAX_RECIPROCAL)
    column_word = tl.zeros((8, 128), tl.uint32)
    for j in tl.static_range(4):
        x = to_float32(xs[j])
        inside = (row + j < rows_left) & (column < columns_left)  # a poisoned group's padding stays 0
        if COLUMNWISE or TWO_D:
            scaled = x * _poisoned_reciprocal(column_code)
            code = tl.where(inside, encode_by_bits(scaled, BITS, MANTISSA_BITS, BIAS, MAX_CODE, MAX_CODE), 0)
        if COLUMNWISE:
            column_word = column_word | (code << (j * BITS))
        if ROWWISE:
            if TWO_D:
                row_code = tl.broadcast_to(tile_code, (8, 4))
            else:
                row_code = _poisoned_code(
                    _group_amax(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF), MAX_RECIPROCAL
                )
                scaled = x * repeat_columns(_poisoned_reciprocal(row_code), 32)
                code = tl.where(
                    inside, encode_by_bits(scaled, BITS, MANTISSA_BITS, BIAS, MAX_CODE, MAX_CODE), 0
                )
            row_word = tl.sum(tl.reshape(code, (8, 32, 4)) << place, axis=2)
            target = data_ptr + ((m0 + j) * row_bytes + k0 // 8 * BITS) + (row * row_bytes + word * BYTES)
            there = (row + j < rows_left) & (k0 // 8 * BITS + word * BYTES < row_bytes)
            for b in tl.static_range(BYTES):
                tl.store(target + b, (row_word >> (8 * b)).to(tl.uint8), mask=there)
            row_scale = tl.where(row + j < rows_left, row_code, 0)
            stride = tiles_k * 4
            target = row_scale_ptr + ((m0 + j) * stride + k0 // 32) + (row * stride + group)
            tl.store(target, row_scale.to(tl.uint8))
    if COLUMNWISE:
        target = (
            column_data_ptr
            + (k0 * column_bytes + m0 // 8 * BITS)
            + (tl.trans(column) * column_bytes + tl.trans(row) // 4 * BYTES)
        )
        packed = tl.trans(column_word)
        there = (tl.trans(column) < columns_left) & (tl.trans(row) * 0 < rows_left)  # all words of a group
        for b in tl.static_range(BYTES):
            tl.store(target + b, (packed >> (8 * b)).to(tl.uint8), mask=there)
        column_scale = tl.where(column < columns_left, column_code, 0)
        target = column_scale_ptr + (k0 * (tiles_m * 4) + tile_m) + column * (tiles_m * 4)
        tl.store(target, column_scale.to(tl.uint8))


@triton.jit(do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"])
def _mx_quantize_kernel(
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
    BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_RECIPROCAL: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SUMS: tl.constexpr,
    TWO_D: tl.constexpr,
    EVEN: tl.constexpr,
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
    xs, _pair = load_four_rows(
        operands, m0, k0, K, rows_left, columns_left, 32, 128, SOURCE, FUNCTION, P0, P1, P2, False, EVEN
    )  # fmt: skip
    if SUMS:
        store_column_sums(sums_ptr + (tile_m * 2 * K + k0), xs, K, rows_left, columns_left)
    if BITS == 8:
        _emit_tile(
            xs, data_ptr, row_scale_ptr, column_data_ptr, column_scale_ptr, tile_m, k0, K, rows_left, columns_left,
            MANTISSA_BITS == 2, MAX_RECIPROCAL, ROWWISE, COLUMNWISE, TWO_D, EVEN,
        )  # fmt: skip
    else:
        _emit_packed_tile(
            xs, data_ptr, row_scale_ptr, column_data_ptr, column_scale_ptr, tile_m, k0, M, K, rows_left,
            columns_left, BITS, MANTISSA_BITS, BIAS, MAX_RECIPROCAL, ROWWISE, COLUMNWISE, TWO_D,
        )  # fmt: skip


_two_warps = Launcher(_mx_quantize_kernel, num_warps=2)
# The bound on registers lets more programs hide the arithmetic's latency.
_two_warps_bounded = Launcher(_mx_quantize_kernel, num_warps=2, maxnreg=96)


def quantize(
    x: Tensor | Source, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Compute ``reference.mx.quantize``, both directions from one read of ``x``: any tensor, or a source of one."""
    source = source_of(x, 2).within_registers()
    M, K = source.matrix
    described = MX_LAYOUTS[fmt.bits].describe(source.shape, rowwise, columnwise)
    buffers = source.out or [source.empty(shape, torch.uint8) for shape, _ in described.values()]
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
            *source.constants, is_wide(M, K), fmt.bits, fmt.mantissa_bits, fmt.bias, fmt.max_reciprocal, rowwise,
            columnwise, sums is not None, two_d, M % 128 == 0 and K % 128 == 0,
        ),
    )  # fmt: skip
    return buffers


@triton.jit(
    do_not_specialize=["scale_stride", "band_bits"],
    do_not_specialize_on_alignment=["scale_ptr"],
)
def _mx_dequantize_packed_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    R,
    C,
    scale_stride,
    band_bits,
    BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    # A tile of 32 rows and 128 columns of the stored matrix [R, C], C a multiple of 32.
    tile_r, tile_c = tile_position(band_bits, False)
    r0 = tile_r * 32
    c0 = tile_c * 128
    if r0 >= R:
        return
    if WIDE:
        R = R + r0 * 0  # 64-bit integers
        C = C + c0 * 0
    BYTES: tl.constexpr = BITS // 2  # bytes of four codes
    rows_left = tl.minimum(R - r0, 32).to(tl.int32)
    columns_left = tl.minimum(C - c0, 128).to(tl.int32)
    row = tl.arange(0, 32)[:, None]
    column = tl.arange(0, 128)[None, :]
    word = tl.arange(0, 32)[None, :]
    group = tl.arange(0, 4)[None, :]
    place = tl.arange(0, 4)[None, None, :] * BITS
    inside = (row < rows_left) & (word * 4 < columns_left)
    stride = C // 8 * BITS
    source = data_ptr + (r0 * stride + c0 // 8 * BITS) + (row * stride + word * BYTES)
    packed = tl.zeros((32, 32), tl.uint32)
    for b in tl.static_range(BYTES):
        packed = packed | (tl.load(source + b, mask=inside, other=0).to(tl.uint32) << (8 * b))
    codes = tl.reshape((tl.expand_dims(packed, 2) >> place) & ((1 << BITS) - 1), (32, 128))
    scales = scale_ptr + (r0 * scale_stride + c0 // 32) + (row * scale_stride + group)
    scale = tl.load(scales, mask=(row < rows_left) & (group * 32 < columns_left), other=0)
    values = decode_subbyte(codes, BITS, MANTISSA_BITS, BIAS) * repeat_columns(e8m0_value(scale), 32)
    values = round_to_dtype(values, out_ptr.dtype.element_ty)
    there = (row < rows_left) & (column < columns_left)
    if TRANSPOSED:
        offsets = tl.trans(column) * R + tl.trans(row)
        tl.store(out_ptr + (c0 * R + r0) + offsets, tl.trans(values), mask=tl.trans(there))
    else:
        tl.store(out_ptr + (r0 * C + c0) + (row * C + column), values, mask=there)


_dequantize_packed = Launcher(_mx_dequantize_packed_kernel, num_warps=4)


def _decode_packed(
    transposed: bool, data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype
) -> Tensor:
    """Compute ``reference.mx.dequantize_packed_rowwise``, or where ``transposed`` ``dequantize_packed_columnwise``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.
    """
    data = check_codes(data, dtype, 2)
    if fmt.bits >= 8:
        raise ValueError(f"{fmt.name} fills a byte; use E2M3, E3M2 or E2M1")
    C = data.shape[-1] * 8 // fmt.bits
    out = data.new_empty((C, data.shape[0]) if transposed else (*data.shape[:-1], C), dtype=dtype)
    if out.numel():
        R = out.numel() // C
        grid, band_bits = tile_grid(cdiv(R, 32), cdiv(C, 128))
        _dequantize_packed(
            grid,
            (data, scale_inv, out, R, C, scale_inv.stride(0), band_bits),
            (fmt.bits, fmt.mantissa_bits, fmt.bias, transposed, max(R, C) >= 2**23),
        )
    return out


dequantize_packed_rowwise = partial(_decode_packed, False)
dequantize_packed_columnwise = partial(_decode_packed, True)
