"""Gated activations and their gradients straight to FP8 with scales of 128 elements, both directions, on Hopper.

``float8_block`` takes what this file does not. There a tile stays in registers until the scales of its columns are
known, which leaves few for computing it and for column sums. Here it waits in shared memory, which Triton's language
does not let a kernel say: rows are computed and encoded a few at a time, then columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import FLOAT8_BLOCK, FLOAT8_FORMATS
from ..upstream.gluon import reinterpret
from .activation import activate_gated, activate_gated_backward
from .codecs import fp8_code, fp8_word, larger, magnitude, round_to_dtype, to_float32
from .launch import TENSOR, GluonLauncher, Launch
from .reduction import PARTIAL_ROWS, fold_pairs
from .scaling import OVERFLOW_BY_DTYPE, power_2_scales
from .tiles import is_wide, tile_grid, tile_position

WARPS = 4
_WARPS = gl.constexpr(WARPS)
_BLOCK = gl.constexpr(FLOAT8_BLOCK)
_PARTS = gl.constexpr(FLOAT8_BLOCK // PARTIAL_ROWS)
_ROWS = gl.constexpr(2 * WARPS)  # rows of a slab: sixteen lanes share a row
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _load_slab(x, grad, F, inside, GRADIENT: gl.constexpr):
    """Gate, linear half and gradient of the result, a few rows of each."""
    a = gl.load(x, mask=inside, other=0.0)
    b = gl.load(x + F, mask=inside, other=0.0)
    g = b
    if GRADIENT:
        g = gl.load(grad, mask=inside, other=0.0)
    return a, b, g


@gluon.jit
def _emit_rows(
    y, stash, slab, largest, data, scales, epsilon, E5M2: gl.constexpr, FP8_MAX: gl.constexpr, OVERFLOW: gl.constexpr,
    EPSILON: gl.constexpr,
):  # fmt: skip
    """Encode rows and leave them in the stash for their columns; ``largest`` magnitudes of those, so far."""
    y = round_to_dtype(y, stash.dtype)
    stash.index(slab).store(y)
    amax = gl.maximum(gl.max(magnitude(y), axis=1), 0.0)
    scale, scale_inv = power_2_scales(amax, epsilon, FP8_MAX, OVERFLOW, EPSILON)
    gl.store(data, fp8_code(to_float32(y) * scale[:, None], E5M2))
    gl.store(scales, scale_inv)
    return larger(largest, y)


@gluon.jit
def _emit_columns(
    stash, largest, epsilon, transpose_ptr, scale_ptr, sums_ptr, tile_m, k0, M, K, SUMS: gl.constexpr,
    E5M2: gl.constexpr, FP8_MAX: gl.constexpr, OVERFLOW: gl.constexpr, EPSILON: gl.constexpr,
):  # fmt: skip
    """Encode the columns of the tile in the stash, 32 rows of four of them in a thread."""
    READ: gl.constexpr = gl.BlockedLayout([_BLOCK // _WARPS, 4], [1, 32], [_WARPS, 1], [1, 0])
    WRITE: gl.constexpr = gl.BlockedLayout([_BLOCK // _WARPS // 4, 4], [1, 32], [_WARPS, 1], [0, 1])
    amax = gl.maximum(gl.max(magnitude(largest), axis=0), 0.0)
    scale, scale_inv = power_2_scales(amax, epsilon, FP8_MAX, OVERFLOW, EPSILON)
    gl.store(scale_ptr + tile_m * K + k0 + gl.arange(0, _BLOCK, layout=scale.type.layout), scale_inv)
    tile = reinterpret(stash, stash.dtype, [_BLOCK, _BLOCK], _PLAIN).load(READ)
    even, odd = gl.split(gl.permute(gl.reshape(tile, [_BLOCK // 4, 2, 2, _BLOCK]), [0, 3, 1, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0 = to_float32(x0)
    x1 = to_float32(x1)
    x2 = to_float32(x2)
    x3 = to_float32(x3)
    if SUMS:  # as ``fused_producers.store_column_sums``
        sums = fold_pairs(fold_pairs((x0 + x1) + (x2 + x3)))
        part = tile_m * _PARTS + gl.arange(0, _PARTS, layout=gl.SliceLayout(1, sums.type.layout))
        column = k0 + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, sums.type.layout))
        gl.store(sums_ptr + part[:, None] * K + column[None, :], sums)
    scale = gl.convert_layout(scale, gl.SliceLayout(0, x0.type.layout))[None, :]
    words = fp8_word(x0 * scale, x1 * scale, x2 * scale, x3 * scale, E5M2)
    words = gl.convert_layout(words, WRITE, assert_trivial=True)
    group = gl.arange(0, _BLOCK // 4, layout=gl.SliceLayout(1, WRITE))
    column = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, WRITE))
    stride = M // 4
    target = transpose_ptr.to(gl.pointer_type(gl.uint32), bitcast=True) + k0 * stride + tile_m * (_BLOCK // 4)
    gl.store(target + (column[None, :] * stride + group[:, None]), words)


@gluon.jit(
    do_not_specialize=["band_bits"],
    do_not_specialize_on_alignment=["row_scale_ptr", "column_scale_ptr", "sums_ptr"],
)
def _gated_hopper_kernel(
    x_ptr,
    grad_ptr,
    data_ptr,
    row_scale_ptr,
    transpose_ptr,
    column_scale_ptr,
    sums_ptr,
    M,
    F,
    band_bits,
    epsilon,
    GRADIENT: gl.constexpr,
    FUNCTION: gl.constexpr,
    P0: gl.constexpr,
    P1: gl.constexpr,
    P2: gl.constexpr,
    E5M2: gl.constexpr,
    FP8_MAX: gl.constexpr,
    OVERFLOW: gl.constexpr,
    EPSILON: gl.constexpr,
):
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    SLABS: gl.constexpr = _BLOCK // _ROWS
    stash_a = gl.allocate_shared_memory(DTYPE, [SLABS, _ROWS, _BLOCK], _PLAIN)
    stash_b = stash_a
    if GRADIENT:
        stash_b = gl.allocate_shared_memory(DTYPE, [SLABS, _ROWS, _BLOCK], _PLAIN)
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * _BLOCK
    k0 = tile_k * _BLOCK
    if m0 < M:
        K = F
        if GRADIENT:
            K = 2 * F
        row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LAYOUT))
        x = x_ptr + m0 * 2 * F + k0 + (row[:, None] * (2 * F) + column[None, :])
        grad = x
        if GRADIENT:
            grad = grad_ptr + m0 * F + k0 + (row[:, None] * F + column[None, :])
        data = data_ptr + m0 * K + k0 + (row[:, None] * K + column[None, :])
        scales = row_scale_ptr + tile_k * M + m0 + row
        largest_a = gl.zeros([_ROWS, _BLOCK], DTYPE, LAYOUT)
        largest_b = largest_a
        a, b, g = _load_slab(x, grad, F, True, GRADIENT)
        for slab in range(SLABS):
            x += _ROWS * 2 * F
            grad += _ROWS * F
            following = _load_slab(x, grad, F, slab < SLABS - 1, GRADIENT)
            a = to_float32(a)
            b = to_float32(b)
            if GRADIENT:
                y, z = activate_gated_backward(to_float32(g), a, b, FUNCTION, P0, P1, P2)
                largest_b = _emit_rows(
                    z, stash_b, slab, largest_b, data + F, scales + F // _BLOCK * M, epsilon, E5M2, FP8_MAX, OVERFLOW,
                    EPSILON,
                )  # fmt: skip
            else:
                y = activate_gated(a, b, FUNCTION, P0, P1, P2)
            largest_a = _emit_rows(
                y, stash_a, slab, largest_a, data, scales, epsilon, E5M2, FP8_MAX, OVERFLOW, EPSILON
            )
            data += _ROWS * K
            scales += _ROWS
            a, b, g = following
        _emit_columns(
            stash_a, largest_a, epsilon, transpose_ptr, column_scale_ptr, sums_ptr, tile_m, k0, M, K, GRADIENT, E5M2,
            FP8_MAX, OVERFLOW, EPSILON,
        )  # fmt: skip
        if GRADIENT:
            _emit_columns(
                stash_b, largest_b, epsilon, transpose_ptr, column_scale_ptr, sums_ptr, tile_m, k0 + F, M, K, GRADIENT,
                E5M2, FP8_MAX, OVERFLOW, EPSILON,
            )  # fmt: skip


_gated = GluonLauncher(_gated_hopper_kernel, num_warps=WARPS)


def launch(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    constants: tuple[Any, ...],
    sums: bool,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    block_dim: int,
    power_2: bool,
    epsilon: float,
) -> Launch | None:
    """Return the launch that quantizes a source, or None if ``float8_block`` is faster; arguments as its ``_launch``.

    This kernel takes both directions of whole tiles, of a gated activation, and of its gradient with column sums;
    without these the general one is faster. Tensors: the operands, then the buffers and the sums or any other.
    """
    kind, *function = constants
    gradient = kind == "gated_backward"
    if dtype.itemsize != 2 or block_dim != 1 or not (power_2 and rowwise and columnwise) or gradient != sums:
        return None
    M, F = math.prod(shape[:-1]), shape[-1] // 2 if gradient else shape[-1]
    if not M * F or M % FLOAT8_BLOCK or F % FLOAT8_BLOCK or is_wide(M, 2 * F):
        return None
    grid, band_bits = tile_grid(M // FLOAT8_BLOCK, F // FLOAT8_BLOCK)
    overflow = OVERFLOW_BY_DTYPE[str(dtype)]
    return Launch(
        _gated,
        grid,
        [TENSOR, TENSOR if gradient else None, *[TENSOR] * 5, M, F, band_bits, epsilon],
        (gradient, *function, fmt == "e5m2", FLOAT8_FORMATS[fmt].max, overflow, epsilon > 0.0),
    )
