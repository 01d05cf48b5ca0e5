"""Products and softmax whose rows do not depend on each other, nor on the number of rows.

A library's GEMM chooses the order of its sums by the sizes. Here the contraction is split at fixed places, and the
products of a block are summed without rounding, so that their order does not matter. For that, both operands of a block
are rounded to integers of 23 bits times a power of two: 128 products of two such integers are exact in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .activation import LOG2_E, exp2
from .reduction import row_sum

BLOCK = 128
"""Contraction that is summed without rounding."""

_BITS = 23
_LN_2 = 0.6931471805599453
_LEAST_EXPONENT = -125.0
_ATANH_TERMS = 9


def matmul(
    left: Tensor,
    right: Tensor,
    splits: int = 1,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``left @ right.mT``, scaled, of rows that do not depend on each other.

    Args:
        left: fp32, bf16 or fp16, (*batch, M, K).
        right: the same, (*batch, N, K).
        splits: into how many equal parts the contraction is split, 1, 2, 4 or 8; see :func:`splits_of`.
        scales: fp32, of all or of each row, (1,) or (M,), and of all or of each column, without a batch; None for 1.
        dtype: of the result, bf16, fp16 or fp32.

    Numerics:
        (*batch, M, N), rounded once from fp32. The sums of the parts are multiplied by the product of both scales,
        rounded, and added by :func:`sum_of_halves`. A part is a sequence of blocks of 128. In a block, every row of an
        operand is rounded to a multiple of ``2**(e - 23)``, ``2**e`` the power of two above its amax; the sum of the
        products of a block is exact, rounded once to fp32, and added to the fp32 sum of the blocks before it.
    """
    length = left.shape[-1] // splits
    pairs = [(left, right)] if splits == 1 else zip(left.split(length, -1), right.split(length, -1))
    sums = [_in_sequence(a, b) for a, b in pairs]
    if scales is not None:
        scale = scales[0][:, None] * scales[1]
        sums = [each * scale for each in sums]
    return sum_of_halves(sums).to(dtype)


def splits_of(contraction: int, most: int = 8, processes: int = 1) -> int:
    """Return into how many parts a linear layer's contraction is split: the largest of 8, 4, 2, 1 of whole blocks.

    Args:
        contraction: of this process.
        most: parts on all processes.
        processes: that share the contraction, which one process splits into as many times these parts.
    """
    whole = contraction * processes
    parts = next(n for n in (8, 4, 2, 1) if n == 1 or (n <= most and whole and whole % (n * BLOCK) == 0))
    return max(parts // processes, 1)


def sum_of_halves(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of 1, 2, 4 or 8 parts: that of the first half plus that of the second."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return sum_of_halves(parts[:half]) + sum_of_halves(parts[half:])


def _in_sequence(left: Tensor, right: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    total = left.new_zeros((*shape, left.shape[-2], right.shape[-2]), dtype=torch.float32)
    if not left.shape[-1]:
        return total
    for a, b in zip(left.split(BLOCK, -1), right.split(BLOCK, -1)):
        (x, x_step), (y, y_step) = _integers(a), _integers(b)
        total += ((x @ y.mT) * x_step * y_step.mT).float()
    return total


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``weights @ values``; a row depends on the values that it gives a weight, and on no others.

    Args:
        weights: fp32, (*batch, M, K), finite and not negative.
        values: fp32, bf16 or fp16, (*batch, K, N).

    Numerics:
        fp32 (*batch, M, N). Row k of the values is rounded to a multiple of ``2**(e - 23)``, ``2**e`` the power of two
        above its amax, and ``2**e`` goes to column k of the weights. Of these, each row is rounded like an operand of
        :func:`matmul`, in blocks of 128. The sum of a block is exact, rounded once to fp32, and added to those before
        it. Values without a weight in any row are not read.
    """
    total = weights.new_zeros((*weights.shape[:-1], values.shape[-1]), dtype=torch.float32)
    if not weights.numel():
        return total
    for a, b in zip(weights.split(BLOCK, -1), values.split(BLOCK, -2)):
        seen = (a != 0).any(-2)[..., None]
        y, y_step = _integers(torch.where(seen, b, 0.0))
        x, x_step = _integers(a.double() * y_step.mT)
        total += ((x @ y) * x_step).float()
    return total


def _integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers of at most 23 bits in fp64, and the power of two, for each row, that they are multiples of."""
    amax = x.abs().amax(-1, keepdim=True).double()
    exponent = torch.frexp(torch.where(amax.isfinite(), amax, 1.0)).exponent
    return (x.double() * _power_of_two(_BITS - exponent)).round_(), _power_of_two(exponent - _BITS)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` in fp64, from its bits: PyTorch's ``ldexp`` computes it in fp32."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dim; zeros for a row of -inf.

    Args:
        logits: fp32, (*lead, K).

    Numerics:
        fp32. ``e / row_sum(e)`` with ``e = exp(logits - max)``, :func:`exp` of this module.
    """
    e = exponentials(logits)[0]
    total = row_sum(e)[..., None]
    return (e / total.masked_fill(total == 0, 1.0)).contiguous()


def logsumexp(logits: Tensor) -> Tensor:
    """Return the log of the sum of exponentials of each row.

    Args:
        logits: fp32, (T, V).

    Numerics:
        fp32 (T,): ``max + log(row_sum(exp(logits - max)))``, :func:`exp` and :func:`log` of this module.
    """
    e, highest = exponentials(logits)
    return log(row_sum(e)) + highest.squeeze(-1)


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return exponentials of the logits below the largest of their row, and that; 0 in place of -inf."""
    if not logits.shape[-1]:
        return logits, logits.new_zeros(*logits.shape[:-1], 1)
    highest = logits.amax(-1, keepdim=True)
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    return exp(logits - highest), highest


def exp(x: Tensor) -> Tensor:
    """Return the exponential of numbers that are not positive.

    Args:
        x: fp32, any shape.

    Numerics:
        ``2**t`` with ``t = x * log2(e)``, as in the sigmoid; 0 where ``t`` is below -125. NaN gives NaN.
    """
    t = x * LOG2_E
    return torch.where(t < _LEAST_EXPONENT, 0.0, exp2(t.clamp(min=_LEAST_EXPONENT)))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm.

    Args:
        x: fp32, any shape, positive or 0.

    Numerics:
        In fp64: ``e * ln(2) + 2 * atanh(s)`` of ``x = m * 2**e`` with ``m`` in [0.75, 1.5) and ``s = (m - 1) / (m +
        1)``, nine terms of the series in Horner form; rounded once to fp32. 0 gives -inf, infinity itself, NaN itself.
    """
    mantissa, exponent = torch.frexp(x.double())
    low = mantissa < 0.75
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = torch.where(low, exponent - 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = s * s, torch.zeros_like(s)
    for term in reversed(range(_ATANH_TERMS)):
        series = series * square + 1.0 / (2 * term + 1)
    value = exponent.double() * _LN_2 + 2.0 * s * series
    value = torch.where(x == 0, float("-inf"), value)
    return torch.where(x.isfinite(), value, x.double()).float()
