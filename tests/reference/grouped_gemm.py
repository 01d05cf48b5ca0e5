"""GEMMs of groups of FP8 codes in plain PyTorch: what those of the kernels are compared with."""

import torch
from torch import Tensor

from narrowcast.formats import FLOAT8_BLOCK, round_up
from narrowcast.reference.grouped_quantize import extents


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
    """Like ``kernels.grouped_gemm.rows``."""
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
    """Like ``kernels.grouped_gemm.contraction``."""
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
