"""GEMMs of groups of FP8 codes: on each group's rows, or over each group's part of the contraction."""

import torch
from torch import Tensor

from ..formats import FLOAT8_BLOCK, round_up
from .grouped_quantize import extents


def rows(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: Tensor,
    bias: Tensor | None,
    *,
    left_block: int,
    right_block: int,
    alignment: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> Tensor:
    """Multiply every group of rows with its own matrix.

    Args:
        left: (P, K) float8_e4m3fn or float8_e5m2; groups start at multiples of ``alignment``.
        left_scale: fp32 (G,), one per group; or per block, (P / left_block, K / 128).
        right: (G, >= columns, K), as ``left``.
        right_scale: fp32 (G,), or per block, (G, columns / right_block, K / 128).
        splits: int32 or int64 (G,).
        bias: (G, columns) or None.
        left_block, right_block: rows that share a scale.
        alignment: rows that groups of ``left`` are padded to.
        dtype: bf16, fp16 or fp32.
        rows, columns: size of the result; its groups lie one after the other.

    Numerics:
        ``RN_dtype(left @ right.T + RN_dtype(bias))`` in fp32; rows beyond the sum of the splits are 0.
    """
    out = torch.zeros((rows, columns), dtype=dtype, device=left.device)
    sizes, starts, _ = extents(splits, rows, 1)
    padded_start = 0
    for group, (start, size) in enumerate(zip(starts, sizes)):
        at = slice(padded_start, padded_start + size)
        a = (
            left[at].float()
            * _spread(left_scale, group, left_block, left.shape[1])[at if left_scale.dim() > 1 else ...]
        )
        b = right[group, :columns].float()
        own = right_scale[group]
        b = b * (own if own.dim() == 0 else _expand(own, right_block, right.shape[2])[:columns])
        product = a @ b.t()
        if bias is not None:
            product += bias[group].to(dtype)
        out[start : start + size] = product.to(dtype)
        padded_start += round_up(size, alignment)
    return out


def contraction(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: Tensor,
    *,
    left_block: int,
    right_block: int,
    alignment: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply two matrices over every group's part of the contraction.

    Args:
        left: (N, P) float8_e4m3fn or float8_e5m2; groups of columns start at multiples of ``alignment``.
        right: (K, P), as ``left``.
        left_scale, right_scale: fp32 (G,), or per block, (N / left_block, P / 128).
        splits, left_block, right_block, alignment, dtype: as of ``rows``, for columns.

    Numerics:
        (G, N, K), ``RN_dtype(left @ right.T)`` in fp32; 0 for an empty group.
    """
    groups = splits.shape[0]
    out = torch.zeros((groups, left.shape[0], right.shape[0]), dtype=dtype, device=left.device)
    sizes, _, starts = extents(splits, left.shape[1], alignment)
    for group, (start, size) in enumerate(zip(starts, sizes)):
        at = slice(start, start + size)
        a = left.float() * _spread(left_scale, group, left_block, left.shape[1])
        b = right.float() * _spread(right_scale, group, right_block, right.shape[1])
        out[group] = (a[: left.shape[0], at] @ b[: right.shape[0], at].t()).to(dtype)
    return out


def _spread(scale: Tensor, group: int, block: int, columns: int) -> Tensor:
    """A group's scale, or the scales of all elements."""
    return scale[group] if scale.dim() == 1 else _expand(scale, block, columns)


def _expand(scale: Tensor, block: int, columns: int) -> Tensor:
    return scale.repeat_interleave(block, 0).repeat_interleave(FLOAT8_BLOCK, 1)[:, :columns]
