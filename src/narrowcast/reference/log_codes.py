"""Groups of fp32 values as a sign and seven bits of their logarithm, for the moments of Adam.

The logarithms between those of a group's smallest and largest magnitude are 125 equal steps. So a group has the error
that its range asks for: half a step, 2.5% of a value at most for a range of 2**9. COAT (Xi et al., arXiv:2410.19313,
section 4) has the same idea with powers that expand a group's range to that of E4M3; the steps of a logarithm are even,
and take less arithmetic.

Logarithms and powers are polynomials in fp32, so that every device gives the same bits. Their errors are 1e-4; codes
are 1 / 208 of a binade apart or more, and ranges multiples of 1 / 256. So encoding decoded values returns codes and
ranges.
"""

import math

import torch
from torch import Tensor

from ..formats import FLOAT8_BLOCK

STEPS = 125.0
"""From the smallest magnitude of a group, code 1, to its largest, 126."""
NOT_FINITE = 255
WIDEST, NARROWEST = 32.0, 154 / 256
"""Binades from the smallest to the largest magnitude of a group, at most and at least."""

_LOG2 = (
    -0.08161582052707672,
    0.31867921352386475,
    -0.6749429702758789,
    1.4377044439315796,
    8.75882979016751e-05,
)
_EXP2 = 0.05500893294811249, 0.2422109693288803, 0.6932829022407532, 1.0
_ROUNDER = 1.5 * 2.0**23  # an fp32 number below 2**22 plus this, minus this, is the nearest integer


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of 128 consecutive values.

    Args:
        x: fp32, any shape; its elements are taken in their order, the last group may have fewer.

    Returns:
        codes: uint8, the shape of ``x``.
        ranges: fp32, shape (groups, 2): of each group, the logarithms of the largest and the smallest magnitude.

    Numerics:
        ``t`` and ``b`` are the largest and the smallest ``log2`` of the magnitudes that are not 0, each rounded to a
        multiple of 1 / 256. ``t`` is at least -125; ``b`` at least ``t`` - 32 and -126, and at most ``t`` - 154 / 256.
        The code of a magnitude ``a`` is 1 + 125 (log2 a - b) (1 / (t - b)), within 1 and 126, rounded to an integer,
        plus 128 for a negative value. Zeros have the codes 0 and 128. A group with a value that is not finite has NaN
        as its range, and 255 as its codes.
    """
    flat = _grouped(x)
    logarithm, some = log2(flat), flat != 0
    largest = logarithm.amax(1, keepdim=True)
    smallest = torch.where(some, logarithm, math.inf).amin(1, keepdim=True)
    top = _on_grid(largest.clamp(min=-125.0))
    bottom = torch.maximum(_on_grid(smallest.clamp(max=128.0)), (top - WIDEST).clamp(min=-126.0))
    bottom = torch.minimum(bottom, top - NARROWEST)
    ranges = torch.where(largest >= 128, math.nan, torch.cat((top, bottom), 1))
    top, bottom = ranges.split(1, 1)
    share = ((logarithm - bottom) * (torch.ones_like(top) / (top - bottom))).nan_to_num(0.0).clamp(0, 1)
    number = (share * STEPS + (_ROUNDER + 1) - _ROUNDER).to(torch.uint8)
    codes = torch.where(some, number, 0) | (flat.signbit() * 128).to(torch.uint8)
    codes = torch.where(largest >= 128, NOT_FINITE, codes).to(torch.uint8)
    return codes.view(-1)[: x.numel()].view(x.shape), ranges


def decode(codes: Tensor, ranges: Tensor) -> Tensor:
    """Decode what ``encode`` returned.

    Args:
        codes: uint8, any shape.
        ranges: fp32, shape (groups, 2).

    Numerics:
        fp32, the shape of ``codes``. The magnitude of code ``n`` is ``exp2(b + (n - 1) ((t - b) / 125))``.
    """
    flat = _grouped(codes)
    top, bottom = ranges.split(1, 1)
    above = (flat & 0x7F).float() - 1
    size = exp2(above * ((top - bottom) * (1 / STEPS)) + bottom)
    size = torch.where(top.isnan(), math.nan, torch.where(above < 0, 0.0, size))
    values = torch.where(flat >= 128, -size, size)
    return values.view(-1)[: codes.numel()].view(codes.shape)


def groups_of(elements: int) -> int:
    """Return how many groups so many elements have."""
    return -(-elements // FLOAT8_BLOCK)


def log2(x: Tensor) -> Tensor:
    """Return the binary logarithm of magnitudes.

    Args:
        x: fp32, any shape.

    Numerics:
        The exponent, and a polynomial of degree 4 in Horner form of the fraction, from bits: within 1e-4. Numbers below
        2**-126, zeros among them, have one of -127 to -126; what is not finite has one of at least 128.
    """
    bits = x.contiguous().view(torch.int32)
    rest = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    p = torch.full_like(rest, _LOG2[0])
    for coefficient in _LOG2[1:]:
        p = p * rest + coefficient
    return (((bits >> 23) & 0xFF) - 127).float() + p


def exp2(x: Tensor) -> Tensor:
    """Return two to a power.

    Args:
        x: fp32, any shape, from -126.5 to below 128.

    Numerics:
        A polynomial of degree 3 in Horner form of what remains of the nearest integer, scaled by bits: within 1.1e-4,
        relative; exact for integers.
    """
    whole = x + _ROUNDER - _ROUNDER
    p = torch.full_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = p * (x - whole) + coefficient
    return (p.view(torch.int32) + (whole.int() << 23)).view(torch.float32)


def _on_grid(x: Tensor) -> Tensor:
    return (x * 256 + _ROUNDER - _ROUNDER) * (1 / 256)


def _grouped(x: Tensor) -> Tensor:
    """Return elements in rows of a group, zeros after the last."""
    flat = x.reshape(-1)
    missing = -flat.numel() % FLOAT8_BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, FLOAT8_BLOCK)
