"""Scales from amaxes as Triton device functions: the rule of ``reference.scaling.scale_from_amax`` and E8M0."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import BF16_MAX, FLT_MAX, FP16_MAX
from .codecs import repeat_columns

_FLT_MAX = tl.constexpr(FLT_MAX)
OVERFLOW_BY_DTYPE = {"torch.bfloat16": BF16_MAX, "torch.float16": FP16_MAX, "torch.float32": FLT_MAX}
"""What a block scale becomes when ``fp8_max / amax`` overflows: the maximum of the input dtype."""


@triton.jit
def scale_from_amax(amax, epsilon, FP8_MAX: tl.constexpr, OVERFLOW: tl.constexpr, POWER_2: tl.constexpr):
    """Return encoding scale of fp32 ``amax``, which is no NaN: ``RN(fp8_max / max(amax, epsilon))``, 1 where that is 0.

    An infinite amax gives 0, whose reciprocal is infinite: what shares the scale decodes to NaN.
    """
    epsilon = tl.cast(epsilon, tl.float32)  # a graph passes floats in double
    amax = tl.where(amax < epsilon, epsilon, amax)
    scale = tl.div_rn(tl.full(amax.shape, FP8_MAX, tl.float32), amax)
    scale = tl.where(scale == float("inf"), OVERFLOW, scale)
    if POWER_2:
        scale = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def scale_or_first(scale, unseen, amax):
    """Compute ``reference.scaling.scale_or_first`` for a negative ``unseen``."""
    first = tl.div_rn(tl.where(amax > 0.0, -tl.cast(unseen, tl.float32), 1.0), amax)
    first = tl.where(first == float("inf"), _FLT_MAX, first)
    first = tl.where(amax > 0.0, first, 1.0)
    return tl.where(scale == 0.0, first, scale)


@triton.jit
def power_2_scales(amax, epsilon, FP8_MAX: tl.constexpr, OVERFLOW: tl.constexpr, EPSILON: tl.constexpr):
    """Return ``scale_from_amax`` with ``POWER_2`` and its reciprocal, in integers: both are exponents only.

    Both fp8 maxima are 1.75 * 2**n, so ``fp8_max / amax`` has the exponent ``n - exponent(amax)`` while the
    significand of amax is at most 1.75 and one less beyond. Quotients just below a power of two do not round up to
    it: the closest is 1 - 1.14 ulp. ``EPSILON``: whether ``epsilon`` is positive.
    """
    if EPSILON:
        epsilon = tl.cast(epsilon, tl.float32)
        amax = tl.where(amax < epsilon, epsilon, amax)
    bits = amax.to(tl.int32, bitcast=True)
    TOP: tl.constexpr = 254 + (8 if FP8_MAX == 448.0 else 15)  # exponent field of 2**n * 2**127
    field = TOP - ((bits + 0x1FFFFF) >> 23)  # the sum carries where the significand exceeds 1.75
    if OVERFLOW > 1e30:
        field = tl.minimum(field, 254)
    else:
        field = tl.where(field > 254, 142, field)  # fp16's maximum, rounded down
    field = tl.where(bits == 0, 127, field)
    inverse = tl.maximum((254 - field) << 23, 0x00400000)  # 2**-127 is subnormal
    # An infinite amax gives the scale 0 and the inverse infinity.
    infinite = bits == 0x7F800000
    field = tl.where(infinite, 0, field)
    inverse = tl.where(infinite, 0x7F800000, inverse)
    return (field << 23).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_from_amax(amax, MAX_RECIPROCAL: tl.constexpr):
    """Return E8M0 code of ``RN(amax * RN(1 / fp8_max))``, rounded up to a power of two, 0..254, as int32; amax is no
    NaN.
    """
    bits = (amax * MAX_RECIPROCAL).to(tl.int32, bitcast=True)
    code = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    return tl.where(bits <= 0x00400000, 0, code)  # up to 2**-127, itself a subnormal, the code is 0


@triton.jit
def e8m0_reciprocal(code):
    """Return ``2**(127 - code)`` as fp32, for codes 0..254 as int32."""
    return tl.maximum((254 - code) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(code):
    """Return fp32 ``2**(code - 127)``; code 0 is a subnormal and 255 NaN."""
    bits = tl.maximum(code.to(tl.int32) << 23, 0x00400000)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scales_of_rows(scale_ptr, row, k, K, inside, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return scales of rows [R] from column ``k`` on, a multiple of 128: [R, 1], or [R, ``COLUMNS``].

    Args:
        inside: [R], which rows are there.
        BLOCK: elements that share a scale.
    """
    GROUPS: tl.constexpr = COLUMNS // BLOCK
    first = row * ((K + 127) // 128 * (128 // BLOCK)) + k // BLOCK
    if GROUPS == 1:  # along rows in one dimension, so that no thread waits for another's
        return _scale_value(tl.load(scale_ptr + first, mask=inside, other=0))[:, None]
    else:
        group = tl.arange(0, GROUPS)[None, :]
        there = inside[:, None] & (group < tl.cdiv(K - k, BLOCK))
        scale = _scale_value(tl.load(scale_ptr + (first[:, None] + group), mask=there, other=0))
        return repeat_columns(scale, BLOCK)


@triton.jit
def _scale_value(scale):
    if scale.dtype == tl.uint8:
        return e8m0_value(scale)
    else:
        return scale
