"""``reference.log_codes`` as device functions: groups of values in rows of a tile, codes and ranges of each.

Integer operations, comparisons and selections take a GPU twice the time of sums and products, so there are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import EMULATE, product

_STEPS = tl.constexpr(125.0)
_PART_OF_STEPS = tl.constexpr(1 / 125.0)
_WIDEST = tl.constexpr(32.0)
_NARROWEST = tl.constexpr(154 / 256)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _saturated(x, factor, summand):
    """Return ``x * factor``, or ``x + summand`` without a factor, from 0 to 1; 0 for NaN."""
    if EMULATE:
        x = x + summand if factor is None else x * factor
        return tl.where(x >= 0.0, tl.minimum(x, 1.0), 0.0)
    elif factor is None:
        return tl.inline_asm_elementwise(
            "add.rn.sat.f32 $0, $1, $2;", "=r,r,r", [x, summand], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _log2(x):
    """Return the logarithm of the magnitude of fp32, from its bits: 128 or more for what is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    rest = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    p = product(rest, -0.08161582052707672) + 0.31867921352386475
    p = product(p, rest) + -0.6749429702758789
    p = product(p, rest) + 1.4377044439315796
    p = product(p, rest) + 8.75882979016751e-05
    whole = (((bits >> 23) & 0xFF) | _ROUNDER_BITS).to(tl.float32, bitcast=True) - (_ROUNDER + 127.0)
    return whole + p


@triton.jit
def _exp2(x):
    """Return two to a power from -126.5 to below 128."""
    rounded = x + _ROUNDER
    f = x - (rounded - _ROUNDER)
    p = product(f, 0.05500893294811249) + 0.2422109693288803
    p = product(p, f) + 0.6932829022407532
    p = product(p, f) + 1.0
    bits = p.to(tl.int32, bitcast=True) + (rounded.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_logarithms(codes, top, bottom, SIGNED: tl.constexpr):
    """Return fp32 values of codes, (groups, elements); their ranges are (groups, 1). ``SIGNED``: some are negative."""
    step = product(top - bottom, _PART_OF_STEPS)
    unit = tl.where(top == top, 1.0, float("nan"))
    bits = codes.to(tl.int32)
    above = ((bits & 0x7F) | _ROUNDER_BITS).to(tl.float32, bitcast=True) - (_ROUNDER + 1.0)
    size = _exp2(product(above, step) + bottom)
    size = size * (_saturated(above, None, tl.full(above.shape, 1.0, tl.float32)) * unit)
    if SIGNED:
        size = (size.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return size


@triton.jit
def _on_grid(x):
    return (x * 256.0 + _ROUNDER - _ROUNDER) * (1 / 256)


@triton.jit
def encode_logarithms(x, SIGNED: tl.constexpr):
    """Return codes of fp32 values, (groups, elements), and the ranges of their logarithms, (groups, 1) each."""
    logarithm = _log2(x)
    some = x != 0.0
    largest = tl.max(logarithm, axis=1, keep_dims=True)
    smallest = tl.min(tl.where(some, logarithm, float("inf")), axis=1, keep_dims=True)
    top = _on_grid(tl.maximum(largest, -125.0))
    bottom = tl.maximum(_on_grid(tl.minimum(smallest, 128.0)), tl.maximum(top - _WIDEST, -126.0))
    bottom = tl.minimum(bottom, top - _NARROWEST)
    not_finite = largest >= 128.0
    top, bottom = tl.where(not_finite, float("nan"), top), tl.where(not_finite, float("nan"), bottom)
    span = top - bottom
    inverse = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), span)
    share = _saturated(logarithm - bottom, tl.broadcast_to(inverse, x.shape), None)
    number = (product(share, _STEPS) + (_ROUNDER + 1.0)).to(tl.int32, bitcast=True)
    codes = tl.where(some, number, 0)
    if SIGNED:
        codes = (codes & 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & ~0x7F)
    codes = codes | tl.where(not_finite, 0xFF, 0)
    return codes.to(tl.uint8), top, bottom
