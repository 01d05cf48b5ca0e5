"""Dequantization of every format: one read of the codes, one write of the values, in the logical orientation.

The FP8 formats with block scales share one tile kernel: they differ in how many elements share a scale along each dim
and in where codes and scales lie, which is what a ``Rule`` says. Transposed codes are read as 32-bit words, transposed
as words, and taken apart in registers: a word holds codes of consecutive rows, so every row of the tile is stored in
long runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_1D, FLOAT8_BLOCK_2D, MXFP8, ElementFormat, Layout, cdiv
from .codecs import decode_fp8, repeat_columns, round_to_dtype
from .dequantize_nvfp4 import nvfp4_block_scaled, nvfp4_columnwise, nvfp4_rowwise
from .launch import Launcher, check_codes, is_aligned
from .mx import dequantize_packed_columnwise as mx_packed_columnwise
from .mx import dequantize_packed_rowwise as mx_packed_rowwise
from .scaling import e8m0_value
from .tiles import load_row, store_row, tile_grid, tile_position

__all__ = [
    "float8",
    "float8_block_columnwise",
    "float8_block_rowwise",
    "float8_rows",
    "float8_transpose",
    "mx_packed_columnwise",
    "mx_packed_rowwise",
    "mxfp8_columnwise",
    "mxfp8_rowwise",
    "nvfp4_block_scaled",
    "nvfp4_columnwise",
    "nvfp4_rowwise",
]

FLAT_BLOCK = 4096
TILE_ROWS = 32
TILE_COLUMNS = 128
TRANSPOSED_TILE_ROWS = 128
TRANSPOSED_TILE_COLUMNS = 64


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
    """Return fp32 scales of a tile, of a shape that broadcasts over it; GROUP_ROWS is 1 or a multiple of TILE_ROWS."""
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
        scale = e8m0_value(scale)
    if GROUPS > 1 and GROUPS < TILE_COLUMNS:
        scale = repeat_columns(scale, GROUP_COLUMNS)
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
    """Return a tile [rows, columns] of codes that are stored as the byte matrix [K, M], by words where rows are
    aligned.
    """
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
def _dequantize_fp8_kernel(
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
        scale_ptr, scale_row_stride, scale_column_stride, m0, k0, M, K, GROUP_ROWS, GROUP_COLUMNS, TILE_ROWS,
        TILE_COLUMNS,
    )  # fmt: skip
    values = round_to_dtype(decode_fp8(codes, E5M2) * scale, out_ptr.dtype.element_ty)
    store_row(out_ptr + start, offsets, values, row, column, rows_left, columns_left, EVEN)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])
def _dequantize_flat_kernel(codes_ptr, scale_ptr, out_ptr, n, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(n - start, BLOCK).to(tl.int32)
    code = tl.load(codes_ptr + start + index, mask=inside, other=0)
    value = decode_fp8(code, E5M2) * tl.load(scale_ptr)
    tl.store(out_ptr + start + index, round_to_dtype(value, out_ptr.dtype.element_ty), mask=inside)


_fp8 = Launcher(_dequantize_fp8_kernel, num_warps=4)
_flat = Launcher(_dequantize_flat_kernel, num_warps=4)


class Rule(NamedTuple):
    """The places of codes and scales of block-scaled FP8, for the kernel; :func:`_rules` reads them off a ``Layout``.

    ``group``: rows and columns of the logical matrix that share a scale. ``transposed``: the codes are stored as
    (K, *lead). ``scales_transposed``: the scales of a group of columns lie side by side, not those of a group of rows.
    """

    group: tuple[int, int]
    transposed: bool
    scales_transposed: bool


def _run(
    codes: Tensor, scale_inv: Tensor, strides: tuple[int, int], rule: Rule, fmt: ElementFormat, out: Tensor
) -> Tensor:
    """Launch the tile kernel; ``strides`` of the scales along rows and columns of the logical matrix."""
    if out.numel() == 0:
        return out
    K = out.shape[-1]
    M = out.numel() // K
    rows = TRANSPOSED_TILE_ROWS if rule.transposed else TILE_ROWS
    columns = TRANSPOSED_TILE_COLUMNS if rule.transposed else TILE_COLUMNS
    grid, band_bits = tile_grid(cdiv(M, rows), cdiv(K, columns))
    even = M % rows == 0 and K % columns == 0
    words = M % 4 == 0 and is_aligned(codes, 4)
    _fp8(
        grid,
        (codes, scale_inv, out, M, K, *strides, band_bits),
        (
            fmt.name == "e5m2", *rule.group, rule.transposed, rows, columns, even, words, max(M, K) >= 2**23,
        ),
    )  # fmt: skip
    return out


def _logical(codes: Tensor, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Return where the values go: the codes' shape, with the first dim last if they are transposed."""
    shape = (*codes.shape[1:], codes.shape[0]) if transposed else codes.shape
    return codes.new_empty(shape, dtype=dtype)


_ONE_SCALE = Rule((FLOAT8_BLOCK, FLOAT8_BLOCK), True, False)
_SCALE_OF_ROW = Rule((1, FLOAT8_BLOCK), False, False)


def _per_tensor(
    transposed: bool, data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype
) -> Tensor:
    """Compute ``reference.float8.dequantize``, or where ``transposed`` ``dequantize_transpose``; of a NaN any NaN.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank 0 of transposed codes.
    """
    data = check_codes(data, dtype, int(transposed), fmt)
    out = _logical(data, transposed, dtype)
    n = data.numel()
    if transposed and data.shape[0] > 1 and n > data.shape[0]:
        return _run(data, scale_inv, (0, 0), _ONE_SCALE, fmt, out)
    if n:  # also a single row or column, whose transpose has the same bytes
        _flat(
            (cdiv(n, FLAT_BLOCK), 1, 1),
            (data, scale_inv, out, n),
            (fmt.name == "e5m2", FLAT_BLOCK),
        )
    return out


def float8_rows(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.float8_rows.dequantize``; of a NaN any NaN.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank 0.
    """
    data = check_codes(data, dtype, 1, fmt)
    return _run(data, scale_inv, (1, 0), _SCALE_OF_ROW, fmt, _logical(data, False, dtype))


def _block_scaled(
    rules: tuple[Rule, ...],
    data: Tensor,
    scale_inv: Tensor,
    fmt: ElementFormat,
    dtype: torch.dtype,
    *,
    two_d: bool = False,
) -> Tensor:
    """Decode FP8 codes with block scales, E8M0 codes or fp32, as ``reference.mx`` and ``reference.float8_block`` do.

    Args:
        rules: of scales per row or column, and of scales per square tile.
        two_d: the scales belong to square tiles.

    Raises:
        ValueError: a tensor the kernels cannot reach, another format or dtype, or rank below 2.
    """
    rule = rules[two_d]
    data = check_codes(data, dtype, 2, fmt)
    down, right = scale_inv.stride(0), scale_inv.stride(1)
    strides = (right, down) if rule.scales_transposed else (down, right)
    return _run(data, scale_inv, strides, rule, fmt, _logical(data, rule.transposed, dtype))


def _rules(layouts: Sequence[Layout], columnwise: bool) -> tuple[Rule, ...]:
    """Return how the buffers of one direction lie, by the records of layouts with block scales."""
    rules = []
    for layout in layouts:
        codes, scales = (buffer.shape for buffer in layout.buffers if buffer.of_direction(columnwise))
        groups = {extent.size: extent.group for extent in scales}
        rules.append(Rule((groups["M"], groups["K"]), codes[0].size == "K", scales[0].size == "K"))
    return tuple(rules)


float8 = partial(_per_tensor, False)
float8_transpose = partial(_per_tensor, True)
_MX = MXFP8, MXFP8  # the scale of a tile stands in each of its rows
_BLOCKS = FLOAT8_BLOCK_1D, FLOAT8_BLOCK_2D
mxfp8_rowwise = partial(_block_scaled, _rules(_MX, False))
mxfp8_columnwise = partial(_block_scaled, _rules(_MX, True))
float8_block_rowwise = partial(_block_scaled, _rules(_BLOCKS, False))
float8_block_columnwise = partial(_block_scaled, _rules(_BLOCKS, True))
