"""Dequantization of NVFP4: row-wise codes by bytes, column-wise codes by 64-bit words that hold one group each.

A word of 16 codes of one column is transposed as a word and taken apart in registers, where the rotation of a group is
undone too; so every row of the tile is stored in long runs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import E2M1, RHT_SIGN_MASK, cdiv, round_to_float32
from .codecs import decode_fp4, decode_fp8, repeat_columns, round_to_dtype
from .launch import Launcher, check_codes, is_aligned
from .nvfp4_groups import butterflies
from .tiles import load_row, store_row, tile_grid, tile_position

TILE_ROWS = 32
TILE_COLUMNS = 128
TRANSPOSED_TILE_ROWS = 128
TRANSPOSED_TILE_COLUMNS = 64


@triton.jit
def _factor(scale, amax, RECIPROCAL: tl.constexpr, SCALED: tl.constexpr):
    """Return the factor of E2M1 values: the block scale, and the share of the amax if ``SCALED``."""
    factor = decode_fp8(scale, False)
    if SCALED:
        factor = factor * amax * RECIPROCAL
    return factor


@triton.jit(
    do_not_specialize=["scale_row_stride", "scale_column_stride", "band_bits"],
    do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"],
)
def _dequantize_nvfp4_rows_kernel(
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
    value = decode_fp4(codes) * repeat_columns(_factor(scale, amax, RECIPROCAL, SCALED), 16)
    value = round_to_dtype(value, out_ptr.dtype.element_ty)
    store_row(out_ptr + (m0 * K + k0), row * K + column, value, row, column, rows_left, columns_left, EVEN)


@triton.jit
def _joined(xs, N: tl.constexpr):
    """Return tensors ``i`` and ``i + N`` of ``2 * N`` joined along a new last dim."""
    ys = ()
    for i in tl.static_range(N):
        ys = ys + (tl.join(xs[i], xs[i + N]),)
    return ys


@triton.jit
def _unrotated(words, factor, SIGN_MASK: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return values [rows, columns] of groups of 16 rows after the inverse rotation, in the order of the reference."""
    values = ()
    for j in tl.static_range(16):
        code = ((words >> (4 * j)) & 0xF).to(tl.uint32)
        values = values + (decode_fp4(code) * factor * 0.25,)
    values = butterflies(values, 8)
    values = butterflies(values, 4)
    values = butterflies(values, 2)
    values = butterflies(values, 1)
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
def _dequantize_nvfp4_columns_kernel(
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
    factor = _factor(scale, amax, RECIPROCAL, True)

    if RHT:
        values = _unrotated(words, factor, SIGN_MASK, TILE_ROWS, TILE_COLUMNS)
    else:
        shift = tl.arange(0, 16)[None, :, None] * 4
        codes = ((tl.expand_dims(words, 1) >> shift) & 0xF).to(tl.uint32)
        values = tl.reshape(decode_fp4(codes) * tl.expand_dims(factor, 1), (TILE_ROWS, TILE_COLUMNS))
    values = round_to_dtype(values, out_ptr.dtype.element_ty)
    row = tl.arange(0, TILE_ROWS)[:, None]
    tile = out_ptr + (m0 * K + k0)
    store_row(tile, row * K + column, values, row, column, rows_left, columns_left, EVEN)


_rows = Launcher(_dequantize_nvfp4_rows_kernel, num_warps=4)
_columns = Launcher(_dequantize_nvfp4_columns_kernel, num_warps=4)


def nvfp4_rowwise(
    data: Tensor, scale_inv: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype, *, columns: int
) -> Tensor:
    """Compute ``reference.nvfp4.dequantize_rowwise``.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, or rank below 2.
    """
    data = check_codes(data, dtype, 2)
    return _run_rows(data, scale_inv, amax.contiguous(), _reciprocal(e4m3_max), dtype, columns)


def nvfp4_block_scaled(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.nvfp4.decode_block_scaled``; raises as :func:`nvfp4_rowwise`."""
    data = check_codes(data, dtype, 2)
    matrix = data.view(math.prod(data.shape[:-1]), data.shape[-1])
    return _run_rows(matrix, scale_inv, None, 1.0, dtype, 2 * data.shape[-1])


def _reciprocal(e4m3_max: int) -> float:
    return round_to_float32(1.0 / (E2M1.max * e4m3_max))


def _run_rows(
    data: Tensor, scale_inv: Tensor, amax: Tensor | None, reciprocal: float, dtype: torch.dtype, K: int
) -> Tensor:
    out = torch.empty((*data.shape[:-1], K), dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    M, packed = out.numel() // K, data.shape[-1]
    grid, band_bits = tile_grid(cdiv(M, TILE_ROWS), cdiv(K, TILE_COLUMNS))
    _rows(
        grid,
        (data, scale_inv, data if amax is None else amax, out, M, K, packed, *scale_inv.stride(), band_bits),
        (
            reciprocal, amax is not None, amax is not None and amax.numel() > 1, TILE_ROWS, TILE_COLUMNS,
            M % TILE_ROWS == 0 and K % TILE_COLUMNS == 0, max(M, K) >= 2**23,
        ),
    )  # fmt: skip
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
    """Compute ``reference.nvfp4.dequantize_columnwise``; raises as :func:`nvfp4_rowwise`."""
    data = check_codes(data, dtype, 2)
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
    _columns(
        grid,
        (words, scale_inv, amax, out, rows, K, groups, *scale_inv.stride(), band_bits),
        (
            _reciprocal(e4m3_max), amax.numel() > 1, rht, RHT_SIGN_MASK if rht and random_signs else 0, *tile,
            rows % tile[0] == 0 and K % tile[1] == 0, max(rows, K) >= 2**23,
        ),
    )  # fmt: skip
    return out
