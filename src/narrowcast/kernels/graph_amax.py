"""Maxima of a tensor in a graph: those that the kernel which wrote it took on the way, or a plain reduction.

Only in a graph, which holds both. Eager code does without: to look tensors up would cost the host more than it saves
the GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..upstream.tensors import storage_key

PARTS = 1024  # at most; a cast program reads all of them at once
CHUNK = 1024  # elements of a row


@dataclass
class Maxima:
    """Of the tensors of an operator that is being lowered.

    Args:
        wanted: a kernel should compute the amax of what it writes: an operator before asked for that of a tensor. Who
            does quantizes with current scaling, in the forward or the gradient that a backward begins with.
        given: tensors that the operator reads, with their maxima.
        asked: the operator asked for an amax.
        made: tensors that the operator wrote, with the maxima that their kernels took.
    """

    wanted: bool
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    asked: bool = False
    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)


_LOWERED: contextvars.ContextVar[Maxima | None] = contextvars.ContextVar("lowered", default=None)


@contextlib.contextmanager
def lowering(maxima: Maxima) -> Iterator[None]:
    """An operator is traced to be lowered, whose tensors have these maxima."""
    token = _LOWERED.set(maxima)
    try:
        yield
    finally:
        _LOWERED.reset(token)


def takes_amax(x: Tensor) -> bool:
    """Return whether a kernel that writes a tensor like ``x`` should compute its amax."""
    lowered = _LOWERED.get()
    return lowered is not None and lowered.wanted and x.numel() > 0


def keep_amax(x: Tensor, maxima: Tensor) -> None:
    """Keep ``maxima``, fp32, as the amax of ``x``, NaN ignored, for the operators after this one."""
    lowered = _LOWERED.get()
    assert lowered is not None
    lowered.made.append((x, maxima))


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
    lowered = _LOWERED.get()
    if lowered is not None:
        lowered.asked = True
        kept = next((maxima for whole, maxima in lowered.given if is_whole(x, whole)), None)
        if kept is not None:
            return in_parts(kept)
    magnitudes = torch.where(x == x, x.abs(), 0)
    # wider than most norms: a warp holds a chunk
    if x.shape[-1] > 4 * CHUNK and x.shape[-1] % CHUNK == 0:
        magnitudes = magnitudes.unflatten(-1, (-1, CHUNK))
    return in_parts(magnitudes.amax(-1).reshape(-1))


def in_parts(maxima: Tensor) -> Tensor:
    """Return the maxima of maxima: at most ``PARTS``, as plain operators of the graph that is being traced."""
    count = maxima.numel()
    return maxima if count <= PARTS else maxima.reshape(min(count & -count, PARTS), -1).amax(1)


def is_whole(x: Tensor, y: Tensor) -> bool:
    """Return whether a contiguous tensor has all elements that another has, in the same memory."""
    same = storage_key(x) == storage_key(y) and x.is_contiguous() and not x.storage_offset()
    return same and (x.dtype, x.numel()) == (y.dtype, y.numel())
