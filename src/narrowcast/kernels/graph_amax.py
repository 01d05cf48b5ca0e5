"""Maxima of a tensor in a graph: those that the kernel which wrote it took on the way, or a plain reduction.

Only in a graph that is being traced, which holds both. Eager code does without: to look tensors up would cost the host
more than it saves the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..upstream.functionalization import FunctionalTensor, functional_mode, state_key

PARTS = 1024  # at most; a cast program reads all of them at once
CHUNK = 1024  # elements of a row
_NAME = "_narrowcast_amax"


def takes_amax(x: Tensor) -> bool:
    """Return whether a kernel that writes ``x`` should compute its amax: an earlier tensor needed one.

    Who does quantizes with current scaling, in the forward or the gradient that a backward begins with.
    """
    return isinstance(x, FunctionalTensor) and x.numel() > 0 and _NAME in vars(functional_mode())


def keep_amax(x: Tensor, maxima: Tensor) -> None:
    """Keep ``maxima``, fp32, as the amax of ``x``, NaN ignored, until ``x`` is written."""
    # kept with the tensor itself: while it lives, no other tensor can get its identity
    _made()[_identity(x)] = (maxima, x)


def kept_amax(x: Tensor) -> Tensor | None:
    """Return the maxima kept for ``x`` or the tensor it is a view of, at most ``PARTS`` of them."""
    if not isinstance(x, FunctionalTensor):
        return None
    maxima, _ = _made().get(_identity(x), (None, None))
    if maxima is None or x.storage_offset() or not x.is_contiguous():
        return None  # a view with as many elements is the whole tensor
    return in_parts(maxima)


def amax_parts_in_graph(x: Tensor) -> Tensor:
    """Return the maxima of parts of a tensor, fp32 or of its dtype, none for an empty one, in the graph that is being
    traced.

    The maxima that the kernel wrote which made ``x``, if it writes any. Else plain operators, row by row first: so the
    compiler takes the maxima in the kernel that writes ``x``, if that is one of its own, a norm's included, which goes
    over rows anyway, and ``x`` is read once less. That kernel may see values before they are rounded; to round the
    largest is to find the largest rounded, and the dtype of the result asks for it.
    """
    if not x.numel():
        return x.new_empty(0, dtype=torch.float32)
    kept = kept_amax(x)
    if kept is not None:
        return kept
    magnitudes = torch.where(x == x, x.abs(), 0)
    # wider than most norms: a warp holds a chunk
    if x.shape[-1] > 4 * CHUNK and x.shape[-1] % CHUNK == 0:
        magnitudes = magnitudes.unflatten(-1, (-1, CHUNK))
    return in_parts(magnitudes.amax(-1).reshape(-1))


def in_parts(maxima: Tensor) -> Tensor:
    """Return the maxima of maxima: at most ``PARTS``, as plain operators of the graph that is being traced."""
    count = maxima.numel()
    return maxima if count <= PARTS else maxima.reshape(min(count & -count, PARTS), -1).amax(1)


def _made() -> dict[Any, Any]:
    return vars(functional_mode()).setdefault(_NAME, {})


def _identity(x: Tensor) -> Any:
    return *state_key(x), x.dtype, x.numel()
