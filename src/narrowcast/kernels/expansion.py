"""``reference.expansion`` as device functions: groups of values in rows of a tile, codes and ranges of each."""

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import decode_fp8, fp8_code, product

_TINY = tl.constexpr(2.0**-126)
_BINADES = tl.constexpr(17.807354922057606)  # log2(448 * 2**9)
_LEAST_SPAN = tl.constexpr(_BINADES.value / 32.0)
_ROOT_HALF = tl.constexpr(0x3F3504F3)


@triton.jit
def _log2(x, EMULATE: tl.constexpr):
    """Return the logarithm of fp32 that is positive and not subnormal."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = product(rest, 0.17212873697280884, EMULATE) + -0.2695062756538391
    p = product(p, rest, EMULATE) + 0.29563361406326294
    p = product(p, rest, EMULATE) + -0.35935065150260925
    p = product(p, rest, EMULATE) + 0.4806291460990906
    p = product(p, rest, EMULATE) + -0.7213640213012695
    p = product(p, rest, EMULATE) + 1.442696452140808
    return exponent.to(tl.float32) + product(p, rest, EMULATE)


@triton.jit
def _exp2(x, EMULATE: tl.constexpr):
    """Return two to a power below 128, 2**-126 at least."""
    x = tl.maximum(x, -126.0)
    whole = tl.floor(x)
    f = x - whole
    p = product(f, 0.0017896650824695826, EMULATE) + 0.009196802042424679
    p = product(p, f, EMULATE) + 0.05565866455435753
    p = product(p, f, EMULATE) + 0.24020686745643616
    p = product(p, f, EMULATE) + 0.693147599697113
    p = product(p, f, EMULATE) + 1.0
    return (p.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _span(top, bottom, EMULATE: tl.constexpr):
    log_top = _log2(tl.maximum(top, _TINY), EMULATE)
    return log_top, tl.maximum(log_top - _log2(tl.maximum(bottom, _TINY), EMULATE), _LEAST_SPAN)


@triton.jit
def decode_expanded(codes, top, bottom, EMULATE: tl.constexpr):
    """Return fp32 values of codes, (groups, elements); their ranges are (groups, 1)."""
    value = decode_fp8(codes, False, EMULATE)
    log_top, span = _span(top, bottom, EMULATE)
    # log2(448), and below 1 / 17.8
    logarithm = _log2(tl.maximum(tl.abs(value), 0.001953125), EMULATE) - 8.807354922057604
    size = _exp2(log_top + product(logarithm, span * 0.056156571505255985, EMULATE), EMULATE)
    number = codes & 0x7F
    size = tl.where(number == 1, bottom, tl.minimum(tl.maximum(size, bottom), top))
    size = tl.where(number == 0x7E, top, tl.where(number == 0, 0.0, size))
    return tl.where(number == 0x7F, value, tl.where(codes >= 0x80, -size, size))


@triton.jit
def encode_expanded(x, EMULATE: tl.constexpr):
    """Return codes of fp32 values, (groups, elements), and the largest and smallest magnitudes, (groups, 1)."""
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    size = tl.where(finite & (x != 0.0), tl.maximum(tl.abs(x), _TINY), 0.0)
    top = tl.max(size, axis=1, keep_dims=True)
    log_top = _log2(tl.maximum(top, _TINY), EMULATE)
    bottom = tl.min(tl.where(size > 0.0, size, float("inf")), axis=1, keep_dims=True)
    bottom = tl.maximum(bottom, _exp2(log_top - _BINADES * 2.0, EMULATE))
    bottom = tl.minimum(bottom, _exp2(log_top - _LEAST_SPAN, EMULATE))
    bottom = tl.where(top > 0.0, bottom, 0.0)
    log_top, span = _span(top, bottom, EMULATE)
    k = tl.div_rn(tl.full(span.shape, _BINADES, tl.float32), span)
    logarithm = _log2(tl.maximum(size, _TINY), EMULATE) - log_top
    expanded = _exp2(product(logarithm, k, EMULATE), EMULATE) * 448.0
    expanded = tl.where(size > 0.0, tl.minimum(tl.maximum(expanded, 0.001953125), 448.0), 0.0)
    expanded = (expanded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    codes = fp8_code(tl.where(finite, expanded, 0.0), False, EMULATE)
    return tl.where(finite, codes, 0x7F).to(tl.uint8), top, bottom
