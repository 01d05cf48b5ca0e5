"""Groups of 16 elements for NVFP4, in device functions: a group is a tuple of 16 tensors.

Everything within a group - the maximum, the rotation, ordered sums, packing eight codes into a word - then stays in the
registers of one thread. The same code serves both directions: row-wise, tensor ``j`` holds column ``16 * g + j`` of
every group; column-wise, row ``16 * g + j``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import FLT_MAX, round_to_float32
from .codecs import (
    at_most,
    decode_e4m3,
    fp4_magnitude,
    fp4_sign,
    fp8_code,
    larger_or_nan,
    magnitude,
    pack_fp4,
    product,
    reciprocal,
    round_pair_to_bfloat16,
    to_float32,
)

_FLT_MAX = tl.constexpr(FLT_MAX)
_ONE_SIXTH = tl.constexpr(round_to_float32(1.0 / 6.0))


@triton.jit
def load_columns(
    x_tile,
    K,
    rows_left,
    columns_left,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
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
        columns = columns + _split_eight(to_float32(values), TILE_M, TILE_K // 16)
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
def load_rows(
    x_tile,
    K,
    rows_left,
    columns_left,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
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
        rows = rows + (to_float32(values),)
    return rows


@triton.jit
def butterflies(xs, DISTANCE: tl.constexpr):
    ys = ()
    for i in tl.static_range(16):
        if i & DISTANCE == 0:
            ys = ys + (xs[i] + xs[i + DISTANCE],)
        else:
            ys = ys + (xs[i - DISTANCE] - xs[i],)
    return ys


@triton.jit
def rotate(xs, SIGN_MASK: tl.constexpr):
    """Return the random Hadamard transform of a group, in the order of additions that ``reference.hadamard`` fixes, in
    fp32;
    ``round_group`` completes it."""
    ys = ()
    for i in tl.static_range(16):
        # the product of a subnormal is rounded, which a multiply-add would skip
        ys = ys + (product(xs[i], -0.25 if (SIGN_MASK >> i) & 1 else 0.25),)
    ys = butterflies(ys, 8)
    ys = butterflies(ys, 4)
    ys = butterflies(ys, 2)
    return butterflies(ys, 1)


@triton.jit
def round_group(ys):
    """Return a group rounded to bf16, as fp32."""
    rounded = ()
    for i in tl.static_range(8):
        first, second = round_pair_to_bfloat16(ys[2 * i], ys[2 * i + 1])
        rounded = rounded + (first, second)
    return rounded


@triton.jit
def group_amax(xs):
    largest = magnitude(xs[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude(xs[i]))
    return tl.maximum(largest, 0.0)  # a maximum over nothing but NaN is NaN


@triton.jit
def _poisoned_amax(xs):
    """Return ``group_amax``, but NaN for a group with a NaN; this maximum is as fast as one that ignores NaN."""
    largest = tl.abs(xs[0])
    for i in tl.static_range(1, 16):
        largest = larger_or_nan(largest, tl.abs(xs[i]))
    return largest


@triton.jit
def _fold(values, HALF: tl.constexpr, MAXIMUM: tl.constexpr):
    """[A, B, 2 * HALF] -> [A, B, HALF]: element ``i`` and element ``i + HALF``, their maximum or their sum; both keep
    a NaN."""
    A: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(values, (A, B, 2, HALF)), (0, 1, 3, 2)))
    if MAXIMUM:
        return larger_or_nan(first, second)
    else:
        return first + second


@triton.jit
def _over_tile(values, AXIS: tl.constexpr, MAXIMUM: tl.constexpr):
    """Return maximum or sum over 16 consecutive lines along ``AXIS``, as a tree (distances 8, 4, 2, 1), repeated on
    each.
    """
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
def _global_scales(amax, E4M3_MAX: tl.constexpr):
    """Return the encoding scale of the tensor (or row) and its rounded reciprocal."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, 6.0 * E4M3_MAX, tl.float32), amax), _FLT_MAX)
    scale = tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)
    return scale, reciprocal(scale)


@triton.jit
def _element_scale(block_scale, global_inverse):
    """Return the factor of elements; a block scale of 0 saturates, not infinity, and NaN stays."""
    decoded = decode_e4m3(block_scale)
    factor = reciprocal(decoded * global_inverse)
    return at_most(factor, _FLT_MAX), decoded


@triton.jit
def _pack_words(sizes, signs):
    """Return the sixteen codes of a group as two words of eight nibbles."""
    low = pack_fp4(*sizes[:8], *signs[:8])
    return low, pack_fp4(*sizes[8:], *signs[8:])


@triton.jit
def _encode_candidate(
    xs,
    base,
    amax,
    global_inverse,
    EXPAND: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
):
    """Return one of the two mappings of "4 over 6": block scales, words, and the error of each group."""
    block_scale = fp8_code(base * EXPAND, False)
    factor, decoded = _element_scale(block_scale, global_inverse)
    divisor = tl.full(base.shape, 6.0 * E4M3_MAX, tl.float32)
    sizes = ()
    signs = ()
    error = tl.zeros(base.shape, tl.float32)
    for j in tl.static_range(16):
        scaled = xs[j] * factor
        size = fp4_magnitude(scaled, 0, False)
        sign = fp4_sign(scaled)
        sizes = sizes + (size,)
        signs = signs + (sign,)
        # Code to value: the bits are an fp32 with a two-bit exponent, moved into place and scaled up by 2**126.
        bits = ((size & 7) << 22) | (sign & 0x80000000)
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
        difference = tl.div_rn(value * decoded * amax, divisor) - xs[j]
        term = product(difference, difference) if MSE else tl.abs(difference)
        error = term if j == 0 else error + term
    low, high = _pack_words(sizes, signs)
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
):
    base = tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * scale
    scale4, low4, high4, error4 = _encode_candidate(xs, base, amax, inverse, 1.5, E4M3_MAX, MSE)
    scale6, low6, high6, error6 = _encode_candidate(xs, base, amax, inverse, 1.0, E4M3_MAX, MSE)
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
):
    block_scale = fp8_code(block_amax * (scale * _ONE_SIXTH), False)
    factor, _decoded = _element_scale(block_scale, inverse)
    if STOCHASTIC:
        # Always true but for a NaN, where no random bit matters; it makes the random words in the threads that hold the
        # groups, instead of moving them there.
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
            sizes = sizes + (fp4_magnitude(scaled, (words[j // 4] >> (8 * (j % 4))) & 0xFF, True),)
        else:
            sizes = sizes + (fp4_magnitude(scaled, 0, False),)
        signs = signs + (fp4_sign(scaled),)
    low, high = _pack_words(sizes, signs)
    return block_scale, low, high


@triton.jit
def encode(
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
):
    """Encode groups: block scales (uint8) and the two words of codes of each group.

    A NaN poisons its group (of a tile: the tile): the scale is NaN, every code +6, and all of it decodes to NaN.

    Args:
        amax: fp32 amax of the global scale, broadcastable to the groups.
        block_index: int64 index of each group in the direction's own grid of blocks, for the random bits.
        AXIS: the axis along which 16 lines form a tile; also the number of the random stream.
    """
    block_amax = _poisoned_amax(xs)
    if TWO_D:
        block_amax = _over_tile(block_amax, AXIS, True)
    scale, inverse = _global_scales(amax, E4M3_MAX)
    if FOUR_OVER_SIX:
        return _encode_four_over_six(xs, block_amax, amax, scale, inverse, AXIS, TWO_D, E4M3_MAX, MSE)
    else:
        return _encode_standard(xs, block_amax, scale, inverse, seed_ptr, block_index, AXIS, STOCHASTIC)
