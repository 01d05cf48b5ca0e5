"""Sums in a fixed order, so that every device gives the same bits.

A tree of pairs decides the order. A zero appended to it changes nothing but the sign of a sum that is zero, and that
sign is fixed here: such a sum is +0. Hence a part of the tree may be summed on its own, in any implementation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 256
MIN_ROWS = 128


def row_sum(v: Tensor) -> Tensor:
    """Sum over the last dimension.

    Args:
        v: fp32, shape (*lead, K).

    Numerics:
        fp32, shape ``lead``. 256 lanes start from zero, lane ``i`` adds elements ``i``, ``i + 256``, ... in
        order, then adjacent pairs of lanes are added until one is left. An empty sum is 0.
    """
    lanes = v.new_zeros(*v.shape[:-1], LANES)
    for chunk in F.pad(v, (0, -v.shape[-1] % LANES)).split(LANES, dim=-1):
        # a width of zero splits into one empty chunk
        lanes[..., : chunk.shape[-1]] += chunk
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes.squeeze(-1)


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows of a matrix.

    Args:
        x: fp32, shape (M, K).

    Numerics:
        fp32, shape (K,). Zero rows are appended up to a power of two, 128 at least; then adjacent pairs of rows
        are added until one is left. A sum that is zero is +0, a NaN is the one of ``canonical_nan``.
    """
    rows = max(1 << (x.shape[0] - 1).bit_length(), MIN_ROWS)
    x = F.pad(x, (0, 0, 0, rows - x.shape[0]))
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return canonical_nan(x.squeeze(0) + 0.0)


def canonical_nan(v: Tensor) -> Tensor:
    """Return the values with every NaN replaced by the one that arithmetic on a GPU produces.

    Args:
        v: fp32, bf16 or fp16, any shape.

    Raises:
        KeyError: another dtype.

    Numerics:
        Same dtype; NaN is positive with all mantissa bits set.
    """
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[v.dtype]
    return v.view(integer).masked_fill(v.isnan(), torch.iinfo(integer).max).view(v.dtype)


def round_to_dtype(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even, once, with the NaN of ``canonical_nan``.

    Args:
        v: fp32, any shape.
        dtype: fp32, bf16 or fp16.

    Raises:
        KeyError: another dtype.

    Numerics:
        What overflows becomes infinite.
    """
    return canonical_nan(v.to(dtype))


def rank_sum(own: Tensor, others: Tensor, rank: int, divisor: int, out: Tensor, alone: bool = True) -> None:
    """Sum of what every rank has, over a divisor, into ``out``.

    Args:
        own: what this rank has, bf16 or fp16, shape (n,).
        others: what the others have, in their order, (ranks - 1, n).
        rank: which of them this is.
        out: fp32, bf16 or fp16, shape (n,).
        alone: whether nothing else runs meanwhile; on a GPU, False leaves most of it to others.

    Numerics:
        In fp32, from zero, in the order of the ranks; then one division, and :func:`round_to_dtype`.
    """
    total = torch.zeros_like(out, dtype=torch.float32)
    for row in (*others[:rank], own, *others[rank:]):
        total += row
    out.copy_(round_to_dtype(total / divisor, out.dtype))
