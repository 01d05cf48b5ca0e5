"""NVFP4: E2M1 elements, E4M3 scales per 16, a global amax; every option of the reference, both directions per tile.

Two passes: the amaxes (per tensor, per row and column, or of the rotated columns), then the encoding. A group of 16
elements is a tuple of 16 tensors, so that everything within a group - the maximum, the rotation, ordered sums, packing
eight codes into a word - stays in the registers of one thread. The same code serves both directions: row-wise, tensor
``j`` holds column ``16 * g + j`` of every group; column-wise, row ``16 * g + j``. The second direction reads the tile
again, from L1, which is cheaper than holding it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    FLT_MAX,
    NVFP4_BLOCK,
    RHT_SIGN_MASK,
    SCALE_TILE_COLUMNS,
    SCALE_TILE_ROWS,
    cdiv,
    round_to_float32,
    round_up,
)
from .codecs import (
    decode_e4m3,
    fp4_magnitude,
    fp4_sign,
    fp8_code,
    magnitude,
    pack_fp4,
    reciprocal,
    round_pair_to_bfloat16,
    to_float32,
)
from .launch import INTERPRETING, Launcher, check_input
from .tiles import tile_grid, tile_position

TILE_M = 128
TILE_K = 64
_FLT_MAX = tl.constexpr(FLT_MAX)
_ONE_SIXTH = tl.constexpr(round_to_float32(1.0 / 6.0))


@triton.jit
def _load_columns(
    x_tile,
    K,
    rows_left,
    columns_left,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """16 tensors [TILE_M, TILE_K / 16]: tensor ``j`` has columns ``16 * g + j``."""
    # Two loads of 8 contiguous elements each leave all 16 elements of a group in one thread.
    row = tl.arange(0, TILE_M)[:, None, None]
    group = tl.arange(0, TILE_K // 16)[None, :, None] * 16
    element = tl.arange(0, 8)[None, None, :]
    offsets = row * K + (group + element)
    columns = ()
    for half in tl.static_range(2):
        if EVEN:
            values = tl.load(x_tile + 8 * half + offsets)
        else:
            inside = (row < rows_left) & (group + element < columns_left - 8 * half)
            values = tl.load(x_tile + 8 * half + offsets, mask=inside, other=0.0)
        columns = columns + _split_eight(to_float32(values, EMULATE), TILE_M, TILE_K // 16)
    return columns


@triton.jit
def _split_eight(values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, GROUPS, 8] -> eight tensors [ROWS, GROUPS], in order."""
    even, odd = tl.split(tl.reshape(values, (ROWS, GROUPS, 4, 2)))
    v04, v26 = tl.split(tl.reshape(even, (ROWS, GROUPS, 2, 2)))
    v15, v37 = tl.split(tl.reshape(odd, (ROWS, GROUPS, 2, 2)))
    v0, v4 = tl.split(v04)
    v2, v6 = tl.split(v26)
    v1, v5 = tl.split(v15)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _load_rows(
    x_tile,
    K,
    rows_left,
    columns_left,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """16 tensors [TILE_M / 16, TILE_K]: tensor ``j`` has rows ``16 * g + j``."""
    row = tl.arange(0, TILE_M // 16)[:, None] * 16
    column = tl.arange(0, TILE_K)[None, :]
    offsets = row * K + column
    rows = ()
    for j in tl.static_range(16):
        if EVEN:
            values = tl.load(x_tile + j * K + offsets)
        else:
            inside = (row + j < rows_left) & (column < columns_left)
            values = tl.load(x_tile + j * K + offsets, mask=inside, other=0.0)
        rows = rows + (to_float32(values, EMULATE),)
    return rows


@triton.jit
def _butterflies(xs, DISTANCE: tl.constexpr):
    ys = ()
    for i in tl.static_range(16):
        if i & DISTANCE == 0:
            ys = ys + (xs[i] + xs[i + DISTANCE],)
        else:
            ys = ys + (xs[i - DISTANCE] - xs[i],)
    return ys


@triton.jit
def _rotate(xs, SIGN_MASK: tl.constexpr):
    """The random Hadamard transform of a group, in the order of additions that ``reference.hadamard`` fixes, in fp32;
    ``_round_group`` completes it."""
    ys = ()
    for i in tl.static_range(16):
        ys = ys + (xs[i] * (-0.25 if (SIGN_MASK >> i) & 1 else 0.25),)
    ys = _butterflies(ys, 8)
    ys = _butterflies(ys, 4)
    ys = _butterflies(ys, 2)
    return _butterflies(ys, 1)


@triton.jit
def _round_group(ys, EMULATE: tl.constexpr):
    """A group rounded to bf16, as fp32."""
    rounded = ()
    for i in tl.static_range(8):
        first, second = round_pair_to_bfloat16(ys[2 * i], ys[2 * i + 1], EMULATE)
        rounded = rounded + (first, second)
    return rounded


@triton.jit
def _group_amax(xs, EMULATE: tl.constexpr):
    largest = magnitude(xs[0], EMULATE)
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude(xs[i], EMULATE))
    return tl.maximum(largest, 0.0)  # a maximum over nothing but NaN is NaN


@triton.jit
def _fold(values, HALF: tl.constexpr, MAXIMUM: tl.constexpr):
    """[A, B, 2 * HALF] -> [A, B, HALF]: element ``i`` and element ``i + HALF``, their maximum or their sum."""
    A: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(values, (A, B, 2, HALF)), (0, 1, 3, 2)))
    if MAXIMUM:
        return tl.maximum(first, second)
    else:
        return first + second


@triton.jit
def _over_tile(values, AXIS: tl.constexpr, MAXIMUM: tl.constexpr):
    """Maximum or sum over 16 consecutive lines along ``AXIS``, as a tree (distances 8, 4, 2, 1), repeated on each."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    if AXIS == 0:
        lines = tl.permute(tl.reshape(values, (R // 16, 16, C)), (0, 2, 1))
    else:
        lines = tl.reshape(values, (R, C // 16, 16))
    folded = _fold(_fold(lines, 8, MAXIMUM), 4, MAXIMUM)
    wide = tl.broadcast_to(_fold(_fold(folded, 2, MAXIMUM), 1, MAXIMUM), lines.shape)
    if AXIS == 0:
        wide = tl.permute(wide, (0, 2, 1))
    return tl.reshape(wide, (R, C))


@triton.jit
def _global_scales(amax, E4M3_MAX: tl.constexpr, EMULATE: tl.constexpr):
    """The encoding scale of the tensor (or row) and its rounded reciprocal."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, 6.0 * E4M3_MAX, tl.float32), amax), _FLT_MAX)
    scale = tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)
    return scale, reciprocal(scale, EMULATE)


@triton.jit
def _element_scale(block_scale, global_inverse, EMULATE: tl.constexpr):
    """What elements are multiplied by; a block scale of 0 saturates, not infinity."""
    decoded = decode_e4m3(block_scale)
    return tl.minimum(reciprocal(decoded * global_inverse, EMULATE), _FLT_MAX), decoded


@triton.jit
def _pack_words(sizes, signs, EMULATE: tl.constexpr):
    """The sixteen codes of a group as two words of eight nibbles."""
    low = pack_fp4(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
        signs[0], signs[1], signs[2], signs[3], signs[4], signs[5], signs[6], signs[7], EMULATE,
    )  # fmt: skip
    high = pack_fp4(
        sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], sizes[13], sizes[14], sizes[15],
        signs[8], signs[9], signs[10], signs[11], signs[12], signs[13], signs[14], signs[15], EMULATE,
    )  # fmt: skip
    return low, high


@triton.jit
def _encode_candidate(
    xs,
    base,
    amax,
    global_inverse,
    EXPAND: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One of the two mappings of "4 over 6": block scales, words, and the error of each group."""
    block_scale = fp8_code(base * EXPAND, False, EMULATE)
    factor, decoded = _element_scale(block_scale, global_inverse, EMULATE)
    divisor = tl.full(base.shape, 6.0 * E4M3_MAX, tl.float32)
    sizes = ()
    signs = ()
    error = tl.zeros(base.shape, tl.float32)
    for j in tl.static_range(16):
        scaled = xs[j] * factor
        size = fp4_magnitude(scaled, 0, False, EMULATE)
        sign = fp4_sign(scaled, EMULATE)
        sizes = sizes + (size,)
        signs = signs + (sign,)
        # Code to value: the bits are an fp32 with a two-bit exponent, moved into place and scaled up by 2**126.
        bits = ((size & 7) << 22) | (sign & 0x80000000)
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
        difference = tl.div_rn(value * decoded * amax, divisor) - xs[j]
        term = difference * difference if MSE else tl.abs(difference)
        error = term if j == 0 else error + term
    low, high = _pack_words(sizes, signs, EMULATE)
    return block_scale, low, high, error


@triton.jit
def _encode_four_over_six(
    xs,
    block_amax,
    amax,
    scale,
    inverse,
    AXIS: tl.constexpr,
    TWO_D: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    base = tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * scale
    scale4, low4, high4, error4 = _encode_candidate(xs, base, amax, inverse, 1.5, E4M3_MAX, MSE, EMULATE)
    scale6, low6, high6, error6 = _encode_candidate(xs, base, amax, inverse, 1.0, E4M3_MAX, MSE, EMULATE)
    if TWO_D:
        error4 = _over_tile(error4, AXIS, False)
        error6 = _over_tile(error6, AXIS, False)
    pick4 = error4 < error6
    return tl.where(pick4, scale4, scale6), tl.where(pick4, low4, low6), tl.where(pick4, high4, high6)


@triton.jit
def _encode_standard(
    xs,
    block_amax,
    scale,
    inverse,
    seed_ptr,
    block_index,
    AXIS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EMULATE: tl.constexpr,
):
    block_scale = fp8_code(block_amax * (scale * _ONE_SIXTH), False, EMULATE)
    factor, _decoded = _element_scale(block_scale, inverse, EMULATE)
    if STOCHASTIC:
        # Always true; it makes the random words in the threads that hold the groups, instead of moving them there.
        block_index = tl.where(block_amax >= 0.0, block_index, 0)
        low_index = (block_index & 0xFFFFFFFF).to(tl.uint32)
        high_index = (block_index >> 32).to(tl.uint32)
        stream = tl.full(block_index.shape, AXIS, tl.uint32)
        words = tl.philox(tl.load(seed_ptr), low_index, high_index, stream, stream * 0)
    sizes = ()
    signs = ()
    for j in tl.static_range(16):
        scaled = xs[j] * factor
        if STOCHASTIC:
            sizes = sizes + (fp4_magnitude(scaled, (words[j // 4] >> (8 * (j % 4))) & 0xFF, True, EMULATE),)
        else:
            sizes = sizes + (fp4_magnitude(scaled, 0, False, EMULATE),)
        signs = signs + (fp4_sign(scaled, EMULATE),)
    low, high = _pack_words(sizes, signs, EMULATE)
    return block_scale, low, high


@triton.jit
def _encode(
    xs,
    amax,
    seed_ptr,
    block_index,
    AXIS: tl.constexpr,
    TWO_D: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Encode groups: block scales (uint8) and the two words of codes of each group.

    Args:
        amax: fp32 amax behind the global scale, broadcastable to the groups.
        block_index: int64 index of each group in the direction's own grid of blocks, for the random bits.
        AXIS: the axis along which 16 lines form a tile; also the number of the random stream.
    """
    block_amax = _group_amax(xs, EMULATE)
    if TWO_D:
        block_amax = _over_tile(block_amax, AXIS, True)
    scale, inverse = _global_scales(amax, E4M3_MAX, EMULATE)
    if FOUR_OVER_SIX:
        return _encode_four_over_six(
            xs, block_amax, amax, scale, inverse, AXIS, TWO_D, E4M3_MAX, MSE, EMULATE
        )
    else:
        return _encode_standard(
            xs, block_amax, scale, inverse, seed_ptr, block_index, AXIS, STOCHASTIC, EMULATE
        )


@triton.jit
def _raise(amax_ptr, value, inside):
    """Raise fp32 amaxes in memory; non-negative floats order like their bits."""
    previous = tl.load(amax_ptr, mask=inside, other=0.0)
    tl.atomic_max(
        amax_ptr.to(tl.pointer_type(tl.int32)),
        value.to(tl.int32, bitcast=True),
        mask=inside & (value > previous),
        sem="relaxed",
    )


@triton.jit
def _raise_one(amax_ptr, value):
    _raise(amax_ptr, value, value >= 0.0)


@triton.jit(do_not_specialize=["band_bits"])
def _amax_kernel(
    x_ptr,
    amax_ptr,
    M,
    K,
    band_bits,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    # Per tensor: amax_ptr[0] is max|x|, amax_ptr[1] that of the rotated columns. Row-scaled: M rows, then K columns.
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_M
    k0 = tile_k * TILE_K
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_M).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_K).to(tl.int32)
    x_tile = x_ptr + (m0 * K + k0)
    if RHT:
        xs = _load_rows(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN, EMULATE)
        if ROWWISE:
            _raise_one(amax_ptr, tl.max(_group_amax(xs, EMULATE)))
        # Rounding is monotonic: the largest rounded magnitude is the largest one, rounded.
        largest = _group_amax(_rotate(xs, SIGN_MASK), EMULATE)
        largest, _same = round_pair_to_bfloat16(largest, largest, EMULATE)
        _raise_one(amax_ptr + 1, tl.max(largest))
    else:
        row = tl.arange(0, TILE_M)
        column = tl.arange(0, TILE_K)
        offsets = row[:, None] * K + column[None, :]
        inside = (row < rows_left)[:, None] & (column < columns_left)[None, :]
        if EVEN:
            size = magnitude(tl.load(x_tile + offsets), EMULATE)
        else:
            size = magnitude(tl.load(x_tile + offsets, mask=inside, other=0.0), EMULATE)
        if ROW_SCALED:
            if ROWWISE:
                _raise(amax_ptr + m0 + row, tl.maximum(tl.max(size, axis=1), 0.0), row < rows_left)
            if COLUMNWISE:
                _raise(
                    amax_ptr + M + k0 + column, tl.maximum(tl.max(size, axis=0), 0.0), column < columns_left
                )
        else:
            _raise_one(amax_ptr, tl.maximum(tl.max(size), 0.0))


@triton.jit(do_not_specialize=["band_bits"], do_not_specialize_on_alignment=["seed_ptr"])
def _encode_kernel(
    x_ptr,
    amax_ptr,
    seed_ptr,
    row_data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    row_amax_ptr,
    column_amax_ptr,
    M,
    K,
    band_bits,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    GROUPS_M: tl.constexpr = TILE_M // 16
    GROUPS_K: tl.constexpr = TILE_K // 16
    # The amax pass ends at the last rows, so what L2 still holds is there: start there.
    tile_m, tile_k = tile_position(band_bits, True)
    m0 = tile_m * TILE_M
    k0 = tile_k * TILE_K
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_M).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_K).to(tl.int32)
    x_tile = x_ptr + (m0 * K + k0)
    blocks_m = (M + 15) // 16
    blocks_k = (K + 15) // 16

    if ROWWISE:
        xs = _load_columns(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN, EMULATE)
        row = tl.arange(0, TILE_M)[:, None]
        block = tl.arange(0, GROUPS_K)[None, :]
        if ROW_SCALED:
            amax = tl.load(amax_ptr + m0 + row, mask=row < rows_left, other=0.0)
            if tile_k == 0:
                tl.store(row_amax_ptr + m0 + row, amax, mask=row < rows_left)
        else:
            amax = tl.load(amax_ptr)
            if (tile_m == 0) & (tile_k == 0):
                tl.store(row_amax_ptr, amax)
            amax = tl.full((1, 1), 0.0, tl.float32) + amax
        index = (m0 + row) * blocks_k + (tile_k * GROUPS_K + block)
        scale, low, high = _encode(
            xs, amax, seed_ptr, index, 0, TWO_D, FOUR_OVER_SIX, E4M3_MAX, MSE, STOCHASTIC, EMULATE
        )
        words = tl.reshape(tl.join(low, high), (TILE_M, 2 * GROUPS_K))
        word = tl.arange(0, 2 * GROUPS_K)[None, :]
        target = row_data_ptr.to(tl.pointer_type(tl.uint32)) + (m0 * blocks_k * 2 + tile_k * (2 * GROUPS_K))
        inside = (row < rows_left) & (word < (blocks_k - tile_k * GROUPS_K) * 2)
        tl.store(target + (row * (blocks_k * 2) + word), words, mask=inside)
        stride = (blocks_k + 3) // 4 * 4
        scale = tl.where(row < rows_left, scale, 0)
        target = row_scale_ptr + (m0 * stride + tile_k * GROUPS_K)
        tl.store(target + (row * stride + block), scale, mask=tile_k * GROUPS_K + block < stride)

    if COLUMNWISE:
        xs = _load_rows(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN, EMULATE)
        if RHT:
            xs = _round_group(_rotate(xs, SIGN_MASK), EMULATE)
        column = tl.arange(0, TILE_K)[None, :]
        block = tl.arange(0, GROUPS_M)[:, None]
        if ROW_SCALED:
            amax = tl.load(amax_ptr + M + k0 + column, mask=column < columns_left, other=0.0)
            if tile_m == 0:
                tl.store(column_amax_ptr + k0 + column, amax, mask=column < columns_left)
        else:
            amax = tl.load(amax_ptr + (1 if RHT else 0))
            if (tile_m == 0) & (tile_k == 0):
                tl.store(column_amax_ptr, amax)
            amax = tl.full((1, 1), 0.0, tl.float32) + amax
        index = (k0 + column) * blocks_m + (tile_m * GROUPS_M + block)
        scale, low, high = _encode(
            xs, amax, seed_ptr, index, 1, TWO_D, FOUR_OVER_SIX, E4M3_MAX, MSE, STOCHASTIC, EMULATE
        )
        words = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), (TILE_K, 2 * GROUPS_M))
        column = tl.arange(0, TILE_K)[:, None]
        word = tl.arange(0, 2 * GROUPS_M)[None, :]
        target = column_data_ptr.to(tl.pointer_type(tl.uint32)) + (
            k0 * blocks_m * 2 + tile_m * (2 * GROUPS_M)
        )
        inside = (column < columns_left) & (word < (blocks_m - tile_m * GROUPS_M) * 2)
        tl.store(target + (column * (blocks_m * 2) + word), words, mask=inside)
        stride = (blocks_m + 3) // 4 * 4
        block = tl.arange(0, GROUPS_M)[None, :]
        scale = tl.where(column < columns_left, tl.trans(scale), 0)
        target = column_scale_ptr + (k0 * stride + tile_m * GROUPS_M)
        tl.store(target + (column * stride + block), scale, mask=tile_m * GROUPS_M + block < stride)


_amax = Launcher(_amax_kernel, num_warps=4)
_encode_tiles = Launcher(_encode_kernel, num_warps=4)
# Two candidates at once need twice the registers per element. Tiles of 16 x 16: with four warps, Triton 3.6 for sm_90
# packs the column-wise codes of other groups, though their scales are right.
_encode_tiles_wide = Launcher(_encode_kernel, num_warps=8)


def _check_options(
    two_d: bool, rht: bool, row_scaled: bool, four_over_six: bool, error_mode: str, stochastic: bool
) -> None:
    exclusive = {
        "rht": (rht, {"two_d": two_d, "row_scaled": row_scaled, "four_over_six": four_over_six}),
        "row_scaled": (row_scaled, {"two_d": two_d}),
        "stochastic rounding": (stochastic, {"row_scaled": row_scaled, "four_over_six": four_over_six}),
    }
    for name, (chosen, others) in exclusive.items():
        for other, also in others.items():
            if chosen and also:
                raise ValueError(f"NVFP4 cannot combine {name} with {other}; turn one of them off")
    if error_mode not in ("MAE", "MSE"):
        raise ValueError(f"unknown 4-over-6 error mode {error_mode!r}; use 'MAE' or 'MSE'")


def supports(**options: object) -> bool:
    """Whether ``quantize`` runs with these options; what it does not is for the reference.

    Stochastic rounding of 16 x 16 tiles, which no recipe asks for, is left to the reference.

    Args:
        options: keyword arguments of ``quantize`` beside the directions.

    Raises:
        Nothing of its own.
    """
    known = {"two_d", "rht", "random_signs", "row_scaled", "four_over_six", "e4m3_max", "error_mode", "seed"}
    return options.keys() <= known and (not options.get("two_d") or options.get("seed") is None)


def quantize(
    x: Tensor,
    *,
    rowwise: bool,
    columnwise: bool,
    two_d: bool = False,
    rht: bool = False,
    random_signs: bool = True,
    row_scaled: bool = False,
    four_over_six: bool = False,
    e4m3_max: int = 448,
    error_mode: str = "MAE",
    seed: Tensor | None = None,
) -> list[Tensor]:
    """Encode to packed E2M1 in one or both directions: an amax pass and an encoding pass, no host synchronisation.

    Args:
        x: (*lead, K), rank >= 2, bf16, fp16 or fp32, any strides; M is the product of ``lead``.
        rowwise: groups of 16 along K.
        columnwise: groups of 16 along M.
        two_d: one block amax per 16 x 16 tile.
        rht: rotate groups of 16 rows before column-wise quantization.
        random_signs: the rotation uses the fixed sign pattern, else all signs are plus.
        row_scaled: one amax per row (column-wise: per column) instead of one per tensor.
        four_over_six: choose per block, or per tile, between mapping its amax to 4 and to 6.
        e4m3_max: the block scale that the tensor's amax maps to, 448 or 256.
        error_mode: what "4 over 6" minimises, "MAE" or "MSE".
        seed: int64 (1,) on the device of ``x`` for stochastic rounding, None for round to nearest even.

    Returns:
        Data and scales of each direction asked for, then their amaxes; shapes as ``reference.nvfp4.quantize`` gives.

    Raises:
        ValueError: a tensor the kernels cannot reach, another dtype, rank below 2, or options that exclude each other.

    Numerics:
        Equal to ``reference.nvfp4.quantize``, byte for byte, stochastic rounding included.
    """
    check_input(x, 2)
    _check_options(two_d, rht, row_scaled, four_over_six, error_mode, seed is not None)
    x = x.contiguous()
    K = x.shape[-1]
    M = math.prod(x.shape[:-1])
    shapes: list[tuple[int, ...]] = []
    amax_shapes: list[tuple[int, ...]] = []
    if rowwise:
        shapes.append((*x.shape[:-1], round_up(K, NVFP4_BLOCK) // 2))
        shapes.append((round_up(M, SCALE_TILE_ROWS), round_up(cdiv(K, NVFP4_BLOCK), SCALE_TILE_COLUMNS)))
        amax_shapes.append((M if row_scaled else 1,))
    if columnwise:
        shapes.append((K, round_up(M, NVFP4_BLOCK) // 2))
        shapes.append((round_up(K, SCALE_TILE_ROWS), round_up(cdiv(M, NVFP4_BLOCK), SCALE_TILE_COLUMNS)))
        amax_shapes.append((K if row_scaled else 1,))
    allocate = torch.zeros if x.numel() == 0 else torch.empty
    buffers = [allocate(shape, dtype=torch.uint8, device=x.device) for shape in shapes]
    amaxes = [allocate(shape, dtype=torch.float32, device=x.device) for shape in amax_shapes]
    if x.numel() == 0 or not buffers:
        return buffers + amaxes
    rht = rht and columnwise
    sign_mask = RHT_SIGN_MASK if rht and random_signs else 0
    # Tiles cover the matrix rounded up to 128 x 128, so that they also write the zeros that pad the scales.
    grid, band_bits = tile_grid(cdiv(M, TILE_M), round_up(K, SCALE_TILE_ROWS) // TILE_K)
    even = M % SCALE_TILE_ROWS == 0 and K % SCALE_TILE_ROWS == 0
    tile = (TILE_M, TILE_K, even, max(M, K) >= 2**23, INTERPRETING)
    amax = torch.zeros(M + K if row_scaled else 2, dtype=torch.float32, device=x.device)
    _amax(grid, (x, amax, M, K, band_bits), (rowwise, columnwise, rht, sign_mask, row_scaled, *tile))
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    encode = _encode_tiles_wide if four_over_six or two_d else _encode_tiles
    encode(
        grid,
        (
            x, amax, amax if seed is None else seed, *buffers[:2], *buffers[-2:], amaxes[0], amaxes[-1], M, K,
            band_bits,
        ),
        (
            rowwise, columnwise, two_d, rht, sign_mask, row_scaled, four_over_six, e4m3_max, error_mode == "MSE",
            seed is not None, *tile,
        ),
    )  # fmt: skip
    return buffers + amaxes
