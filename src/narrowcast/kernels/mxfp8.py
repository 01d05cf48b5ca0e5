"""MXFP8: E8M0 scales per 32 elements along K and along M, or per 32 x 32 tile, from one read of a tile.

The column-wise data keep the logical orientation, so nothing is transposed. A program is a single warp with a tile of
32 x 128, where every lane holds short pieces of many rows: the maxima along both directions stay within the warp and
need neither shared memory nor barriers. A tile fills whole 128-byte lines of both scale buffers' rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import MXFP8_BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, ElementFormat, cdiv, round_up
from .codecs import fp8_code, magnitude, to_float32
from .launch import INTERPRETING, Launcher, check_input, dim_class, is_aligned
from .scaling import e8m0_from_amax, e8m0_reciprocal

_GRID_ROWS = 32768  # tile rows along the second grid dimension, which is limited to 65535


@triton.jit
def _spread(values, ROWS: tl.constexpr):
    """[R, 4] -> [ROWS, 128], each column repeated 32 times; R is ROWS or 1."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(values, 2), (ROWS, 4, 32)), (ROWS, 128))


@triton.jit(do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr"])
def _quantize_kernel(
    x_ptr,
    data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    M,
    K,
    E5M2: tl.constexpr,
    MAX_RECIPROCAL: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # Programs cover the matrix rounded up to 128 x 128, so that they also write the zeros that pad the scales.
    tile_k = tl.program_id(0).to(tl.int64)
    tile_m = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    m0 = tile_m * 32
    k0 = tile_k * 128
    if m0 >= (M + 127) // 128 * 128:
        return
    if WIDE:
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, 32).to(tl.int32)
    columns_left = tl.minimum(K - k0, 128).to(tl.int32)
    row = tl.arange(0, 32)[:, None]
    column = tl.arange(0, 128)[None, :]
    group = tl.arange(0, 4)[None, :]
    offsets = row * K + column
    inside = (row < rows_left) & (column < columns_left)
    start = m0 * K + k0
    if EVEN:
        x = to_float32(tl.load(x_ptr + start + offsets), EMULATE)
    else:
        x = to_float32(tl.load(x_ptr + start + offsets, mask=inside, other=0.0), EMULATE)
    size = magnitude(x, EMULATE)
    tiles_k = (K + 127) // 128

    if ROWWISE or TWO_D:
        amax = tl.max(tl.reshape(size, (32, 4, 32)), axis=2)
        if TWO_D:
            amax = tl.max(amax, axis=0, keep_dims=True)
        row_code = e8m0_from_amax(tl.maximum(amax, 0.0), MAX_RECIPROCAL)
        data = fp8_code(x * _spread(e8m0_reciprocal(row_code), 32), E5M2, EMULATE)
    if ROWWISE:
        if EVEN:
            tl.store(data_ptr + start + offsets, data)
        else:
            tl.store(data_ptr + start + offsets, data, mask=inside)
        row_scale = tl.where(row < rows_left, tl.broadcast_to(row_code, (32, 4)), 0)
        stride = tiles_k * 4
        tl.store(row_scale_ptr + (m0 * stride + tile_k * 4) + (row * stride + group), row_scale.to(tl.uint8))
    if COLUMNWISE:
        if TWO_D:
            column_data = data
            column_code = _spread(row_code, 1)
        else:
            amax = tl.maximum(tl.max(size, axis=0, keep_dims=True), 0.0)
            column_code = e8m0_from_amax(amax, MAX_RECIPROCAL)
            column_data = fp8_code(x * e8m0_reciprocal(column_code), E5M2, EMULATE)
        if EVEN:
            tl.store(column_data_ptr + start + offsets, column_data)
        else:
            tl.store(column_data_ptr + start + offsets, column_data, mask=inside)
        column_scale = tl.where(column < columns_left, column_code, 0)
        tl.store(column_scale_ptr + (tile_m * tiles_k * 128 + k0) + column, column_scale.to(tl.uint8))


_quantize = Launcher(_quantize_kernel, num_warps=1)


def quantize(
    x: Tensor, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Encode with one power-of-two scale per 32 elements, both directions from one read of ``x``.

    Args:
        x: (*lead, K), rank >= 2, bf16, fp16 or fp32, any strides; M is the product of ``lead``.
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
    check_input(x, 2)
    x = x.contiguous()
    K = x.shape[-1]
    M = math.prod(x.shape[:-1])
    shapes: list[tuple[int, ...]] = []
    if rowwise:
        groups = cdiv(K, MXFP8_BLOCK)
        shapes += [tuple(x.shape), (round_up(M, SCALE_TILE_ROWS), round_up(groups, SCALE_TILE_COLUMNS))]
    if columnwise:
        groups = cdiv(M, MXFP8_BLOCK)
        shapes += [tuple(x.shape), (round_up(groups, SCALE_TILE_COLUMNS), round_up(K, SCALE_TILE_ROWS))]
    if x.numel() == 0:
        return [torch.zeros(shape, dtype=torch.uint8, device=x.device) for shape in shapes]
    buffers = [torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes]
    if not buffers:
        return buffers
    tile_rows = round_up(M, 128) // 32
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    _quantize(
        (cdiv(K, 128), min(tile_rows, _GRID_ROWS), cdiv(tile_rows, _GRID_ROWS)),
        (x, *buffers[:2], *buffers[-2:], M, K),
        (
            fmt.name == "e5m2",
            fmt.max_reciprocal,
            rowwise,
            columnwise,
            two_d,
            M % 128 == 0 and K % 128 == 0,
            K >= 2**23,
            INTERPRETING,
        ),
        (x.dtype, is_aligned(x), dim_class(M), dim_class(K)),
    )
    return buffers
