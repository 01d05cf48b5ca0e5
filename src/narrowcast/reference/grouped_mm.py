"""Products of groups of rows in high precision, not rounded to the dtype of the operands."""

import torch
from torch import Tensor

from .grouped_quantize import extents


def contraction(left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``left_g^T right_g`` for every group g of rows.

    Args:
        left: (T, N) bf16, fp16 or fp32.
        right: (T, K), as ``left``.
        splits: int32 or int64 (G,).
        dtype: bf16, fp16 or fp32.

    Returns:
        (G, N, K) of ``dtype``; 0 for an empty group.

    Numerics:
        Products and sums in fp32, one rounding to ``dtype``.
    """
    out = left.new_zeros((splits.shape[0], left.shape[1], right.shape[1]), dtype=dtype)
    sizes, starts, _ = extents(splits, left.shape[0], 1)
    for group, (start, size) in enumerate(zip(starts, sizes)):
        if size:
            at = slice(start, start + size)
            out[group] = (left[at].float().t() @ right[at].float()).to(dtype)
    return out


def rows(left: Tensor, right: Tensor, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``left_g right_g^T`` for every group g of rows.

    Args:
        left: (T, K) bf16, fp16 or fp32.
        right: (G, N, K), as ``left``; of any strides.
        splits: int32 or int64 (G,).
        dtype: bf16, fp16 or fp32.

    Returns:
        (T, N) of ``dtype``; rows of no group are zero.

    Numerics:
        Products and sums in fp32, one rounding to ``dtype``.
    """
    out = left.new_zeros((left.shape[0], right.shape[1]), dtype=dtype)
    sizes, starts, _ = extents(splits, left.shape[0], 1)
    for group, (start, size) in enumerate(zip(starts, sizes)):
        if size:
            at = slice(start, start + size)
            out[at] = (left[at].float() @ right[group].float().t()).to(dtype)
    return out
