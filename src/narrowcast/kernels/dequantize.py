"""Dequantization of every format: one read of the codes, one write of the values, in the logical orientation.

The FP8 formats share one tile kernel: they differ in how many elements share a scale along each dim and in where the
scales lie. Transposed codes are read as 32-bit words (NVFP4: 64-bit words), transposed as words, and taken apart in
registers: a word holds codes of consecutive rows, so every row of the tile is stored in long runs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    E2M1,
    FLOAT8_BLOCK,
    MXFP8_BLOCK,
    RHT_SIGN_MASK,
    ElementFormat,
    cdiv,
    round_to_float32,
)
from .codecs import round_to_dtype
from .launch import INTERPRETING, Launcher, check_device, is_aligned
from .nvfp4 import _butterflies
from .tiles import load_row, store_row, tile_grid, tile_position

FLAT_BLOCK = 4096
TILE_ROWS = 32
TILE_COLUMNS = 128
TRANSPOSED_TILE_ROWS = 128
TRANSPOSED_TILE_COLUMNS = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _decode_fp8(code, E5M2: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 values of uint8 codes, NaN and infinities included."""
    if E5M2:  # the upper byte of an fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif EMULATE:
        size = code.to(tl.uint32) & 0x7F
        value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        value = tl.where(size == 0x7F, float("nan"), value)
        sign = (code.to(tl.uint32) & 0x80) << 24
        return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _decode_e8m0(code):
    """fp32 ``2**(code - 127)``; code 0 is a subnormal and 255 NaN."""
    bits = tl.maximum(code.to(tl.int32) << 23, 0x00400000)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _decode_fp4(code):
    """fp32 values of E2M1 codes 0..15 given as uint32: moved into place as a tiny fp32, scaled up exactly."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _spread(values, TIMES: tl.constexpr):
    """[R, C] -> [R, C * TIMES], every column repeated."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    repeated = tl.broadcast_to(tl.expand_dims(values, 2), (ROWS, COLUMNS, TIMES))
    return tl.reshape(repeated, (ROWS, COLUMNS * TIMES))


@triton.jit
def _block_scale(
    scale_ptr,
    row_stride,
    column_stride,
    m0,
    k0,
    M,
    K,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """fp32 scales of a tile, of a shape that broadcasts over it; GROUP_ROWS is 1 or a multiple of TILE_ROWS."""
    ROWS: tl.constexpr = TILE_ROWS if GROUP_ROWS == 1 else 1
    GROUPS: tl.constexpr = TILE_COLUMNS // GROUP_COLUMNS if GROUP_COLUMNS < TILE_COLUMNS else 1
    m = m0 + tl.arange(0, ROWS)
    row_offsets = m // GROUP_ROWS * row_stride
    if GROUPS == 1:
        one_column = scale_ptr + k0 // GROUP_COLUMNS * column_stride
        scale = tl.expand_dims(tl.load(one_column + row_offsets, mask=m < M, other=0), 1)
    else:
        k = (k0 + tl.arange(0, GROUPS) * GROUP_COLUMNS)[None, :]
        offsets = row_offsets[:, None] + k // GROUP_COLUMNS * column_stride
        scale = tl.load(scale_ptr + offsets, mask=(m[:, None] < M) & (k < K), other=0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = _decode_e8m0(scale)
    if GROUPS > 1 and GROUPS < TILE_COLUMNS:
        scale = _spread(scale, GROUP_COLUMNS)
    return scale


@triton.jit
def _load_transposed(
    codes_ptr,
    m0,
    k0,
    M,
    rows_left,
    columns_left,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A tile [rows, columns] of codes that are stored as the byte matrix [K, M], by words where rows are aligned."""
    column = tl.arange(0, TILE_COLUMNS)[:, None]
    if WORDS:
        stride = M // 4
        group = tl.arange(0, TILE_ROWS // 4)[None, :]
        source = (
            codes_ptr.to(tl.pointer_type(tl.uint32)) + (k0 * stride + m0 // 4) + (column * stride + group)
        )
        if EVEN:
            words = tl.load(source)
        else:
            words = tl.load(source, mask=(column < columns_left) & (group < rows_left // 4), other=0)
        shift = tl.arange(0, 4)[None, :, None] * 8
        codes = (tl.expand_dims(tl.trans(words), 1) >> shift) & 0xFF
        return tl.reshape(codes, (TILE_ROWS, TILE_COLUMNS)).to(tl.uint8)
    row = tl.arange(0, TILE_ROWS)[None, :]
    inside = (column < columns_left) & (row < rows_left)
    return tl.trans(tl.load(codes_ptr + (k0 * M + m0) + (column * M + row), mask=inside, other=0))


@triton.jit(
    do_not_specialize=["scale_row_stride", "scale_column_stride", "band_bits"],
    do_not_specialize_on_alignment=["scale_ptr"],
)
def _fp8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    M,
    K,
    scale_row_stride,
    scale_column_stride,
    band_bits,
    E5M2: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    row = tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    offsets = row * K + column
    start = m0 * K + k0
    if TRANSPOSED:
        codes = _load_transposed(
            codes_ptr, m0, k0, M, rows_left, columns_left, TILE_ROWS, TILE_COLUMNS, EVEN, WORDS
        )
    else:
        tile = codes_ptr + start
        codes = load_row(tile, offsets, row, column, rows_left, columns_left, EVEN).to(tl.uint8)
    scale = _block_scale(
        scale_ptr,
        scale_row_stride,
        scale_column_stride,
        m0,
        k0,
        M,
        K,
        GROUP_ROWS,
        GROUP_COLUMNS,
        TILE_ROWS,
        TILE_COLUMNS,
    )
    values = round_to_dtype(_decode_fp8(codes, E5M2, EMULATE) * scale, out_ptr.dtype.element_ty, EMULATE)
    store_row(out_ptr + start, offsets, values, row, column, rows_left, columns_left, EVEN)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])
def _flat_kernel(
    codes_ptr, scale_ptr, out_ptr, n, E5M2: tl.constexpr, BLOCK: tl.constexpr, EMULATE: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(n - start, BLOCK).to(tl.int32)
    code = tl.load(codes_ptr + start + index, mask=inside, other=0)
    value = _decode_fp8(code, E5M2, EMULATE) * tl.load(scale_ptr)
    tl.store(out_ptr + start + index, round_to_dtype(value, out_ptr.dtype.element_ty, EMULATE), mask=inside)


@triton.jit
def _fp4_factor(scale, amax, RECIPROCAL: tl.constexpr, SCALED: tl.constexpr, EMULATE: tl.constexpr):
    """What E2M1 values are multiplied by: the block scale, and the share of the amax if ``SCALED``."""
    factor = _decode_fp8(scale, False, EMULATE)
    if SCALED:
        factor = factor * amax * RECIPROCAL
    return factor


@triton.jit(
    do_not_specialize=["scale_row_stride", "scale_column_stride", "band_bits"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],
)
def _fp4_rows_kernel(
    codes_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    M,
    K,
    packed_columns,
    scale_row_stride,
    scale_column_stride,
    band_bits,
    RECIPROCAL: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        K = K.to(tl.int64)
        packed_columns = packed_columns.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    row = tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    byte = tl.arange(0, TILE_COLUMNS // 2)[None, :]
    group = tl.arange(0, TILE_COLUMNS // 16)[None, :]
    source = codes_ptr + (m0 * packed_columns + k0 // 2)
    pairs = load_row(source, row * packed_columns + byte, row, 2 * byte, rows_left, columns_left, EVEN).to(
        tl.uint32
    )
    codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (TILE_ROWS, TILE_COLUMNS))
    inside = row < rows_left
    at = (m0 + row) * scale_row_stride + (k0 // 16 + group) * scale_column_stride
    scale = tl.load(scale_ptr + at, mask=inside & (group * 16 < columns_left), other=0)
    amax = 0.0
    if ROW_SCALED:
        amax = tl.load(amax_ptr + m0 + row, mask=inside, other=0.0)
    elif SCALED:
        amax = tl.load(amax_ptr)
    value = _decode_fp4(codes) * _spread(_fp4_factor(scale, amax, RECIPROCAL, SCALED, EMULATE), 16)
    value = round_to_dtype(value, out_ptr.dtype.element_ty, EMULATE)
    store_row(out_ptr + (m0 * K + k0), row * K + column, value, row, column, rows_left, columns_left, EVEN)


@triton.jit
def _joined(xs, N: tl.constexpr):
    """Tensors ``i`` and ``i + N`` of ``2 * N`` joined along a new last dim."""
    ys = ()
    for i in tl.static_range(N):
        ys = ys + (tl.join(xs[i], xs[i + N]),)
    return ys


@triton.jit
def _unrotated(words, factor, SIGN_MASK: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Values [rows, columns] of groups of 16 rows after the inverse rotation, in the order of the reference."""
    values = ()
    for j in tl.static_range(16):
        code = ((words >> (4 * j)) & 0xF).to(tl.uint32)
        values = values + (_decode_fp4(code) * factor * 0.25,)
    values = _butterflies(values, 8)
    values = _butterflies(values, 4)
    values = _butterflies(values, 2)
    values = _butterflies(values, 1)
    signed = ()
    for j in tl.static_range(16):
        signed = signed + (values[j] * (-1.0 if (SIGN_MASK >> j) & 1 else 1.0),)  # a minus would be 0 - x
    joined = _joined(_joined(_joined(_joined(signed, 8), 4), 2), 1)
    groups = tl.reshape(joined[0], (TILE_ROWS // 16, TILE_COLUMNS, 16))
    return tl.reshape(tl.permute(groups, (0, 2, 1)), (TILE_ROWS, TILE_COLUMNS))


@triton.jit(
    do_not_specialize=["scale_row_stride", "scale_column_stride", "band_bits"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],
)
def _fp4_columns_kernel(
    words_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    M,
    K,
    groups,
    scale_row_stride,
    scale_column_stride,
    band_bits,
    RECIPROCAL: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # A 64-bit word is the 16 codes of one group of rows in one column.
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_ROWS
    k0 = tile_k * TILE_COLUMNS
    if m0 >= M:
        return
    if WIDE:
        K = K.to(tl.int64)
        groups = groups.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_ROWS).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_COLUMNS).to(tl.int32)
    t_column = tl.arange(0, TILE_COLUMNS)[:, None]
    t_group = tl.arange(0, TILE_ROWS // 16)[None, :]
    inside = (t_column < columns_left) & (t_group * 16 < rows_left)
    source = words_ptr + (k0 * groups + m0 // 16) + (t_column * groups + t_group)
    words = tl.trans(tl.load(source, mask=inside, other=0))
    at = (k0 + t_column) * scale_row_stride + (m0 // 16 + t_group) * scale_column_stride
    scale = tl.trans(tl.load(scale_ptr + at, mask=inside, other=0))
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    if ROW_SCALED:
        amax = tl.load(amax_ptr + k0 + column, mask=column < columns_left, other=0.0)
    else:
        amax = tl.load(amax_ptr)
    factor = _fp4_factor(scale, amax, RECIPROCAL, True, EMULATE)

    if RHT:
        values = _unrotated(words, factor, SIGN_MASK, TILE_ROWS, TILE_COLUMNS)
    else:
        shift = tl.arange(0, 16)[None, :, None] * 4
        codes = ((tl.expand_dims(words, 1) >> shift) & 0xF).to(tl.uint32)
        values = tl.reshape(_decode_fp4(codes) * tl.expand_dims(factor, 1), (TILE_ROWS, TILE_COLUMNS))
    values = round_to_dtype(values, out_ptr.dtype.element_ty, EMULATE)
    row = tl.arange(0, TILE_ROWS)[:, None]
    tile = out_ptr + (m0 * K + k0)
    store_row(tile, row * K + column, values, row, column, rows_left, columns_left, EVEN)


_fp8 = Launcher(_fp8_kernel, num_warps=4)
_flat = Launcher(_flat_kernel, num_warps=4)
_fp4_rows = Launcher(_fp4_rows_kernel, num_warps=4)
_fp4_columns = Launcher(_fp4_columns_kernel, num_warps=4)


def _checked(data: Tensor, dtype: torch.dtype, min_rank: int, fmt: ElementFormat | None = None) -> Tensor:
    check_device(data)
    if dtype not in _DTYPES:
        raise ValueError(f"cannot dequantize to {dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    if fmt is not None and fmt.name not in ("e4m3", "e5m2"):
        raise ValueError(f"{fmt.name} is not an FP8 format; use E4M3 or E5M2")
    if data.dim() < min_rank:
        raise ValueError(
            f"cannot dequantize data of shape {tuple(data.shape)}; this format needs rank {min_rank} or more"
        )
    return data.contiguous()


def _run_flat(codes: Tensor, scale_inv: Tensor, fmt: ElementFormat, out: Tensor) -> Tensor:
    n = codes.numel()
    if n:
        _flat(
            (cdiv(n, FLAT_BLOCK), 1, 1),
            (codes, scale_inv, out, n),
            (fmt.name == "e5m2", FLAT_BLOCK, INTERPRETING),
        )
    return out


def _run_fp8(
    codes: Tensor,
    scale_inv: Tensor,
    strides: tuple[int, int],
    groups: tuple[int, int],
    fmt: ElementFormat,
    out: Tensor,
    transposed: bool,
) -> Tensor:
    """Launch the tile kernel; ``strides`` of the scales along rows and columns of the logical matrix."""
    if out.numel() == 0:
        return out
    K = out.shape[-1]
    M = out.numel() // K
    rows = TRANSPOSED_TILE_ROWS if transposed else TILE_ROWS
    columns = TRANSPOSED_TILE_COLUMNS if transposed else TILE_COLUMNS
    grid, band_bits = tile_grid(cdiv(M, rows), cdiv(K, columns))
    _fp8(
        grid,
        (codes, scale_inv, out, M, K, *strides, band_bits),
        (
            fmt.name == "e5m2",
            *groups,
            transposed,
            rows,
            columns,
            M % rows == 0 and K % columns == 0,
            M % 4 == 0 and is_aligned(codes, 4),
            max(M, K) >= 2**23,
            INTERPRETING,
        ),
    )
    return out


def float8(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode per-tensor FP8 codes.

    Args:
        data: uint8, any shape.
        scale_inv: fp32, one element.
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.

    Returns:
        ``data.shape`` in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype.

    Numerics:
        ``RN_dtype(RN(code * scale_inv))``; equal to ``reference.float8.dequantize``, as a NaN any NaN.
    """
    data = _checked(data, dtype, 0, fmt)
    return _run_flat(data, scale_inv, fmt, torch.empty_like(data, dtype=dtype))


def float8_transpose(transpose: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode transposed per-tensor FP8 codes into the logical orientation.

    Args:
        transpose: uint8 (K, *lead), rank >= 1.
        scale_inv: fp32, one element.
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.

    Returns:
        (*lead, K) in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank 0.

    Numerics:
        Equal to ``reference.float8.dequantize_transpose``.
    """
    transpose = _checked(transpose, dtype, 1, fmt)
    K = transpose.shape[0]
    out = torch.empty((*transpose.shape[1:], K), dtype=dtype, device=transpose.device)
    if K <= 1 or transpose.numel() == K:
        return _run_flat(transpose, scale_inv, fmt, out)  # one row or column: the bytes are in order
    return _run_fp8(transpose, scale_inv, (0, 0), (FLOAT8_BLOCK, FLOAT8_BLOCK), fmt, out, True)


def mxfp8_rowwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode row-wise MXFP8.

    Args:
        data: uint8 (*lead, K), rank >= 2.
        scale_inv: uint8, compact, (round_up(M, 128), round_up(cdiv(K, 32), 4)).
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.

    Returns:
        ``data.shape`` in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.

    Numerics:
        ``RN_dtype(RN(code * 2**(b - 127)))``; equal to ``reference.mxfp8.dequantize_rowwise``.
    """
    data = _checked(data, dtype, 2, fmt)
    out = torch.empty_like(data, dtype=dtype)
    return _run_fp8(data, scale_inv, _strides(scale_inv), (1, MXFP8_BLOCK), fmt, out, False)


def mxfp8_columnwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode column-wise MXFP8, which has the logical orientation.

    Args:
        data: uint8 (*lead, K), rank >= 2.
        scale_inv: uint8, compact, (round_up(cdiv(M, 32), 4), round_up(K, 128)).
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.

    Returns:
        ``data.shape`` in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.

    Numerics:
        Equal to ``reference.mxfp8.dequantize_columnwise``.
    """
    data = _checked(data, dtype, 2, fmt)
    out = torch.empty_like(data, dtype=dtype)
    return _run_fp8(data, scale_inv, _strides(scale_inv), (MXFP8_BLOCK, 1), fmt, out, False)


def float8_block_rowwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, *, two_d: bool
) -> Tensor:
    """Decode row-wise block-scaled FP8.

    Args:
        data: uint8 (*lead, K), rank >= 2.
        scale_inv: fp32, as ``float8_block.quantize`` gives it.
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.
        two_d: the scales belong to tiles of 128 x 128.

    Returns:
        ``data.shape`` in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.

    Numerics:
        ``RN_dtype(RN(code * scale_inv))``; equal to ``reference.float8_block.dequantize_rowwise``.
    """
    data = _checked(data, dtype, 2, fmt)
    out = torch.empty_like(data, dtype=dtype)
    down, right = _strides(scale_inv)
    strides, rows = ((down, right), FLOAT8_BLOCK) if two_d else ((right, down), 1)
    return _run_fp8(data, scale_inv, strides, (rows, FLOAT8_BLOCK), fmt, out, False)


def float8_block_columnwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, *, two_d: bool
) -> Tensor:
    """Decode column-wise block-scaled FP8 into the logical orientation.

    Args:
        data: uint8 (K, *lead), rank >= 2.
        scale_inv: fp32, as ``float8_block.quantize`` gives it.
        fmt: E4M3 or E5M2.
        dtype: bf16, fp16 or fp32.
        two_d: the scales belong to tiles of 128 x 128.

    Returns:
        (*lead, K) in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.

    Numerics:
        Equal to ``reference.float8_block.dequantize_columnwise``.
    """
    data = _checked(data, dtype, 2, fmt)
    out = torch.empty((*data.shape[1:], data.shape[0]), dtype=dtype, device=data.device)
    down, right = _strides(scale_inv)
    strides, columns = ((right, down), FLOAT8_BLOCK) if two_d else ((down, right), 1)
    return _run_fp8(data, scale_inv, strides, (FLOAT8_BLOCK, columns), fmt, out, True)


def _strides(scales: Tensor) -> tuple[int, int]:
    return scales.stride(0), scales.stride(1)


def nvfp4_rowwise(
    data: Tensor, scale_inv: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype, *, columns: int
) -> Tensor:
    """Decode row-wise NVFP4.

    Args:
        data: uint8 (*lead, round_up(columns, 16) / 2), rank >= 2.
        scale_inv: uint8, compact, (round_up(M, 128), round_up(cdiv(columns, 16), 4)).
        amax: fp32 (1,), or (M,) for row-scaled data.
        e4m3_max: as it was when quantizing.
        dtype: bf16, fp16 or fp32.
        columns: K, the last dim of the logical tensor.

    Returns:
        (*lead, K) in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, or rank below 2.

    Numerics:
        ``RN(code * RN(RN(scale * amax) * RN(1 / (6 * e4m3_max))))``, then rounded to ``dtype``; equal to
        ``reference.nvfp4.dequantize_rowwise``.
    """
    data = _checked(data, dtype, 2)
    return _run_fp4_rows(data, scale_inv, amax.contiguous(), _reciprocal(e4m3_max), dtype, columns)


def nvfp4_block_scaled(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode NVFP4 codes times block scales, without the tensor's amax: what an emulated GEMM multiplies.

    Args:
        data: uint8 (R, C / 2), C a multiple of 16: row-wise data as a matrix, or column-wise data as stored.
        scale_inv: uint8, compact scales of the same direction.
        dtype: bf16, fp16 or fp32; the values are exact in each.

    Returns:
        (R, C) in ``dtype``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, or rank below 2.

    Numerics:
        Equal to ``reference.nvfp4.decode_block_scaled``.
    """
    data = _checked(data, dtype, 2)
    matrix = data.view(math.prod(data.shape[:-1]), data.shape[-1])
    return _run_fp4_rows(matrix, scale_inv, None, 1.0, dtype, 2 * data.shape[-1])


def _reciprocal(e4m3_max: int) -> float:
    return round_to_float32(1.0 / (E2M1.max * e4m3_max))


def _run_fp4_rows(
    data: Tensor, scale_inv: Tensor, amax: Tensor | None, reciprocal: float, dtype: torch.dtype, K: int
) -> Tensor:
    out = torch.empty((*data.shape[:-1], K), dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    M, packed = out.numel() // K, data.shape[-1]
    grid, band_bits = tile_grid(cdiv(M, TILE_ROWS), cdiv(K, TILE_COLUMNS))
    _fp4_rows(
        grid,
        (data, scale_inv, data if amax is None else amax, out, M, K, packed, *_strides(scale_inv), band_bits),
        (
            reciprocal,
            amax is not None,
            amax is not None and amax.numel() > 1,
            TILE_ROWS,
            TILE_COLUMNS,
            M % TILE_ROWS == 0 and K % TILE_COLUMNS == 0,
            max(M, K) >= 2**23,
            INTERPRETING,
        ),
    )
    return out


def nvfp4_columnwise(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    e4m3_max: int,
    dtype: torch.dtype,
    *,
    rows: int,
    rht: bool = False,
    random_signs: bool = True,
) -> Tensor:
    """Decode column-wise NVFP4 into the logical orientation.

    Args:
        data: uint8 (K, round_up(rows, 16) / 2).
        scale_inv: uint8, compact, (round_up(K, 128), round_up(cdiv(rows, 16), 4)).
        amax: fp32 (1,), or (K,) for row-scaled data.
        e4m3_max: as it was when quantizing.
        dtype: bf16, fp16 or fp32.
        rows: M, the number of rows of the logical matrix.
        rht: undo the rotation; False returns rotated values as they are.
        random_signs: the setting of the rotation.

    Returns:
        (M, K) in ``dtype``, also for N-d sources.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, or another rank.

    Numerics:
        Equal to ``reference.nvfp4.dequantize_columnwise``; the rotation is undone in fp32.
    """
    data = _checked(data, dtype, 2)
    if not is_aligned(data, 8):
        data = data.clone()  # groups of 16 codes are read as 64-bit words
    K = data.shape[0]
    out = torch.empty((rows, K), dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    amax = amax.contiguous()
    words = data.view(torch.uint64)
    groups = words.shape[1]
    tile = (TRANSPOSED_TILE_ROWS, TRANSPOSED_TILE_COLUMNS)
    grid, band_bits = tile_grid(cdiv(rows, tile[0]), cdiv(K, tile[1]))
    _fp4_columns(
        grid,
        (words, scale_inv, amax, out, rows, K, groups, *_strides(scale_inv), band_bits),
        (
            _reciprocal(e4m3_max),
            amax.numel() > 1,
            rht,
            RHT_SIGN_MASK if rht and random_signs else 0,
            *tile,
            rows % tile[0] == 0 and K % tile[1] == 0,
            max(rows, K) >= 2**23,
            INTERPRETING,
        ),
    )
    return out
