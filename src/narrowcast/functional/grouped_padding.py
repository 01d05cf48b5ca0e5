"""``narrowcast::pad_rows`` and ``unpad_rows``: the rows of each group padded to what a grouped GEMM needs, and back.

Both are differentiable; each is the other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..formats import padded_rows, round_up
from ._library import define, give_backward
from .grouped_quantize import splits_on_device
from .numerics import computed_by


def _pad_fake(x: Tensor, splits: Tensor, alignment: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    ends = splits.new_empty(splits.shape, dtype=torch.int32)
    return x.new_empty((rows, x.shape[1])), splits.new_empty(splits.shape), ends


_pad_op = define(
    "pad_rows(Tensor x, Tensor splits, SymInt alignment, SymInt rows) -> (Tensor, Tensor, Tensor)",
    computed_by("grouped_padding", "pad_rows"),
    _pad_fake,
)
_unpad_op = define(
    "unpad_rows(Tensor padded, Tensor splits, SymInt alignment, SymInt rows) -> Tensor",
    computed_by("grouped_padding", "unpad_rows"),
    lambda padded, splits, alignment, rows: padded.new_empty((rows, padded.shape[1])),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, splits, ctx.alignment, _ = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(splits)


def _pad_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
    (splits,) = ctx.saved_tensors
    return _unpad_op(grad, splits, ctx.alignment, ctx.rows), None, None, None


def _unpad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (splits,) = ctx.saved_tensors
    return _pad_op(grad, splits, ctx.alignment, ctx.rows)[0], None, None, None


give_backward("pad_rows", _pad_backward, _setup_context)
give_backward("unpad_rows", _unpad_backward, _setup_context)


def pad_rows(x: Tensor, splits: Tensor | Sequence[int], alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-pad each group of rows to a multiple of ``alignment`` rows.

    Args:
        x: (T, K), dtype of 1, 2 or 4 bytes; the groups one after the other. Differentiable.
        splits: rows of each group, non-negative, G of them: a list, or an int32 or int64 tensor on the device of
            ``x``, which is not read by the host.
        alignment: rows that every padded group is a multiple of.

    Returns:
        The padded rows, zero outside the groups; padded splits (G,); their running sum int32 (G,). The rows are
        as many as needed for a list, and for a tensor as many as any splits could need:
        ``round_up(T + G * (alignment - 1), alignment)``.

    Raises:
        ValueError: no matrix, another dtype, a bad ``alignment`` or ``splits``, or a list whose sum is not T.
    """
    _check(x, splits, alignment)
    if isinstance(splits, Tensor):
        rows = padded_rows(x.shape[0], splits.shape[0], alignment)
        return _pad_op(x, splits, alignment, rows)
    _check_sum(splits, x.shape[0])
    rows = sum(round_up(split, alignment) for split in splits)
    return _pad_op(x, splits_on_device(x.detach(), list(splits)), alignment, rows)


def unpad_rows(padded: Tensor, splits: Tensor | Sequence[int], alignment: int, rows: int) -> Tensor:
    """Undo :func:`pad_rows`.

    Args:
        padded: (P, K), dtype of 1, 2 or 4 bytes. Differentiable.
        splits: as they were when padding.
        alignment: as it was when padding.
        rows: T, the rows of the result.

    Returns:
        (T, K), without the padding; rows beyond the sum of the splits are zero.

    Raises:
        ValueError: no matrix, another dtype, a bad ``alignment`` or ``splits``, or a list whose sum is not ``rows``.
    """
    _check(padded, splits, alignment)
    if isinstance(splits, Tensor):
        return _unpad_op(padded, splits, alignment, rows)
    _check_sum(splits, rows)
    return _unpad_op(padded, splits_on_device(padded.detach(), list(splits)), alignment, rows)


def _check(x: Tensor, splits: Tensor | Sequence[int], alignment: int) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; grouped rows are a matrix (rows, columns)")
    if x.element_size() not in (1, 2, 4):
        raise ValueError(f"x is {x.dtype}; use a dtype of 1, 2 or 4 bytes")
    if alignment < 1:
        raise ValueError(f"alignment is {alignment}; use 1 or more")
    if not isinstance(splits, Tensor):
        return
    if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"splits is {splits.dtype} of shape {tuple(splits.shape)}; use torch.int32 or torch.int64 (groups,)"
        )
    if splits.device != x.device:
        raise ValueError(f"splits is on {splits.device}, x on {x.device}; move splits there, or pass a list")


def _check_sum(splits: Sequence[int], rows: int) -> None:
    if any(split < 0 for split in splits) or sum(splits) != rows:
        raise ValueError(
            f"splits is {shown(list(splits))}; use non-negative numbers whose sum is the {rows} rows"
        )
