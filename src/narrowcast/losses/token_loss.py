"""From what is known of each token to its loss, and from the loss's gradient to what the backward multiplies with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import numbers, shape_of, tensor, whole
from .._tracing import host_reads


class Smoothing(NamedTuple):
    """The reading of a target: its smoothing over the vocabulary, and the ignored index."""

    label_smoothing: float
    ignore_index: int


def token_loss(
    statistics: Tensor, target: Tensor, columns: int, smoothing: Smoothing
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each token, and the log of its sum of exponentials for the backward.

    Args:
        statistics: fp32 (3, T) of the whole vocabulary, as ``reference.cross_entropy.statistics``.
        target: (T,).
        columns: of the whole vocabulary.

    Returns:
        fp32 (T,) twice. The loss of an ignored token is 0. Where a target is no column both are NaN.
    """
    lse, at_target, total = statistics.unbind(0)
    loss = lse - (1.0 - smoothing.label_smoothing) * at_target
    if smoothing.label_smoothing:
        loss = loss - (smoothing.label_smoothing / columns) * total
    ignored = target == smoothing.ignore_index
    outside = ((target < 0) | (target >= columns)) & ~ignored
    nan = float("nan")
    return torch.where(ignored, 0.0, torch.where(outside, nan, loss)), torch.where(outside, nan, lse)


def token_gradient(grad: Tensor, target: Tensor, smoothing: Smoothing) -> Tensor:
    """Return the gradient of each token's loss, fp32 (T,); 0 for the ignored."""
    return torch.where(target == smoothing.ignore_index, 0.0, grad.float())


def mean_loss(loss: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the mean over the tokens that are not ignored; 0 where all of them are."""
    return loss.sum() / (target != ignore_index).sum().clamp(min=1)


def check_target(target: Tensor, columns: int, smoothing: Smoothing, name: str, rows: Tensor) -> None:
    """Check a target and its options; ``rows`` (*lead, columns or features) is the argument ``name``.

    Raises:
        TypeError: an argument of another type.
        ValueError: the shape is not (*lead,), the dtype is neither int64 nor int32, the smoothing is not within [0, 1],
            or, in eager code on a CPU, where reading it costs nothing, a target is neither a column nor ignored.
    """
    tensor("target", target)
    numbers(label_smoothing=smoothing.label_smoothing)
    whole(ignore_index=smoothing.ignore_index)
    if target.shape != rows.shape[:-1]:
        raise ValueError(
            f"target has shape {shape_of(target)}, but {name} {shape_of(rows)} needs {shape_of(rows)[:-1]}: "
            "one class per token"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target has dtype {target.dtype}; use torch.int64 or torch.int32")
    if not 0.0 <= smoothing.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {smoothing.label_smoothing}; use a number from 0 to 1")
    if not host_reads(target) or not target.numel():
        return
    outside = ((target < 0) | (target >= columns)) & (target != smoothing.ignore_index)
    if outside.any():
        raise ValueError(
            f"target {int(target[outside][0])} is out of range: use 0 to {columns - 1}, or "
            f"{smoothing.ignore_index} to ignore a token"
        )
