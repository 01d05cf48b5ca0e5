"""Groups of fp32 values as E4M3 codes whose dynamic range is expanded to that of E4M3, for the moments of Adam.

A scale alone uses a part of E4M3's range: the magnitudes of a group of moments span far fewer than its 17.8 binades.
COAT (Xi et al., arXiv:2410.19313, section 4) takes ``sign(x) |x|**k`` before it scales, with the ``k`` for which a
group's range is that of the format; the error of a value then is that of its code divided by ``k``. With the largest
and the smallest magnitude of a group as what is stored, both are exact, and encoding decoded values returns the codes.

Logarithms and powers are polynomials in fp32, so that every device gives the same bits.
"""

import math

import torch
from torch import Tensor

from ..formats import E4M3, FLOAT8_BLOCK
from .codecs import decode_float8, encode_float8_

SMALLEST = 2.0**-9
BINADES = math.log2(E4M3.max / SMALLEST)
EXPONENTS = 0.5, 32.0
"""The least and the largest ``k``: a group's range is taken to be from 2**0.56 to 2**35.6."""

_LOG2 = (
    0.17212873697280884,
    -0.2695062756538391,
    0.29563361406326294,
    -0.35935065150260925,
    0.4806291460990906,
    -0.7213640213012695,
    1.442696452140808,
)
_EXP2 = (
    0.0017896650824695826,
    0.009196802042424679,
    0.05565866455435753,
    0.24020686745643616,
    0.693147599697113,
    1.0,
)
_ROOT_HALF = 0x3F3504F3  # fp32 of the root of 1/2
_TINY = 2.0**-126


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of 128 consecutive values.

    Args:
        x: fp32, any shape; its elements are taken in their order, the last group may have fewer.

    Returns:
        codes: uint8, the shape of ``x``.
        ranges: fp32, shape (groups, 2), the largest and the smallest magnitude of each group.

    Numerics:
        Magnitudes are those of finite values that are not 0, at least 2**-126. With the largest ``t``, the smallest
        is clamped to ``t`` over 2**35.6 and 2**0.56: ``b``. With ``k = log2(448 * 2**9) / (log2 t - log2 b)`` the
        code of a magnitude ``a`` is E4M3 of ``448 * 2**(k (log2 a - log2 t))``, and no smaller than the smallest that
        is not 0. Zeros keep their sign. What is not finite becomes NaN, code 0x7F.
    """
    flat = _grouped(x)
    finite = flat.isfinite()
    size = torch.where(finite & (flat != 0), flat.abs().clamp(min=_TINY), 0.0)
    top = size.amax(1, keepdim=True)
    log_top = log2(top.clamp(min=_TINY))
    least, most = (exp2(log_top - BINADES / k) for k in EXPONENTS)
    bottom = torch.where(size > 0, size, math.inf).amin(1, keepdim=True).clamp(min=least).clamp(max=most)
    ranges = torch.cat((top, torch.where(top > 0, bottom, 0.0)), 1)
    log_top, span = _span(ranges)
    k = torch.full_like(span, BINADES) / span
    expanded = exp2((log2(size.clamp(min=_TINY)) - log_top) * k) * E4M3.max
    expanded = torch.where(size > 0, expanded.clamp(SMALLEST, E4M3.max), 0.0).copysign(flat)
    codes = torch.where(finite, encode_float8_(expanded, E4M3), 0x7F)
    return codes.view(-1)[: x.numel()].view(x.shape), ranges


def decode(codes: Tensor, ranges: Tensor) -> Tensor:
    """Decode what ``encode`` returned.

    Args:
        codes: uint8, any shape.
        ranges: fp32, shape (groups, 2).

    Numerics:
        fp32, the shape of ``codes``. The largest code is ``t``, the smallest ``b``; another of value ``e`` is
        ``2**(log2 t + (log2 e - log2 448) / k)``, within these.
    """
    flat = _grouped(codes)
    value = decode_float8(flat, E4M3)
    top, bottom = ranges.split(1, 1)
    log_top, span = _span(ranges)
    logarithm = log2(value.abs().clamp(min=SMALLEST)) - math.log2(E4M3.max)
    size = exp2(log_top + logarithm * (span * (1 / BINADES)))
    size = torch.where(flat & 0x7F == 1, bottom, torch.minimum(torch.maximum(size, bottom), top))
    size = torch.where(flat & 0x7F == 0x7E, top, torch.where(value == 0, 0.0, size))
    values = torch.where(value.isnan(), value, size.copysign(value))
    return values.view(-1)[: codes.numel()].view(codes.shape)


def groups_of(elements: int) -> int:
    """Return how many groups so many elements have."""
    return -(-elements // FLOAT8_BLOCK)


def log2(x: Tensor) -> Tensor:
    """Return the binary logarithm.

    Args:
        x: fp32, any shape, positive and not subnormal.

    Numerics:
        The exponent of ``x`` over the root of 1/2, and a polynomial of degree 7 in Horner form of what remains, minus
        1: within 1e-6 of it, then rounded. Exact for powers of two.
    """
    bits = x.view(torch.int32)
    exponent = (bits - _ROOT_HALF) >> 23
    rest = (bits - (exponent << 23)).view(torch.float32) - 1.0
    p = torch.full_like(rest, _LOG2[0])
    for coefficient in _LOG2[1:]:
        p = p * rest + coefficient
    return exponent.float() + p * rest


def exp2(x: Tensor) -> Tensor:
    """Return two to a power.

    Args:
        x: fp32, any shape, below 128.

    Numerics:
        A polynomial of degree 5 in Horner form of the fraction, scaled by bits: within 4e-7, relative. Powers from
        -126 down give 2**-126.
    """
    x = x.clamp(min=-126.0)
    whole = x.floor()
    p = torch.full_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = p * (x - whole) + coefficient
    return (p.view(torch.int32) + (whole.int() << 23)).view(torch.float32)


def _span(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Return log2 of the largest magnitude, and by how much that of the smallest is less, each (groups, 1)."""
    top, bottom = (log2(x.clamp(min=_TINY)) for x in ranges.split(1, 1))
    return top, (top - bottom).clamp(min=BINADES / EXPONENTS[1])


def _grouped(x: Tensor) -> Tensor:
    """Return elements in rows of a group, zeros after the last."""
    flat = x.reshape(-1)
    missing = -flat.numel() % FLOAT8_BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, FLOAT8_BLOCK)
