"""The scale of a tensor's own amax, found by the launch that casts it: for delayed scaling that has seen nothing yet.

No code can be written before all of the tensor was read, and the programs of a launch do not all run at once. So each
takes parts of the tensor, in order, until none is left, and then waits until all parts are done. Programs that run have
taken them, and none of these waits before its part is done. Afterwards every program reads its own part again and casts
it. A program waits only while the scale is 0, so later launches of the same code find a branch that is not taken.

The words of this are zeros, fp32 (3,), or (3, G) of G groups: amax, parts taken, parts done. The last program sets them
to 0 again: a graph may give the same zeros to every cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scaling import scale_or_first

ROWS_AT_ONCE = tl.constexpr(16)
"""Rows of a part that are loaded at once: with more, the branch would need more registers than the cast."""


def rule_of(unseen: float) -> str:
    """Return what a cast does at a scale of 0, the constant ``FIRST``: "own" finds the scale, "given" is told it."""
    return "own" if unseen < 0.0 else "given" if unseen else ""


def words_of(like: Tensor, groups: int = 1) -> Tensor:
    """Return the words of a launch on the device of ``like``."""
    return torch.zeros((3, groups), dtype=torch.float32, device=like.device)


@triton.jit
def take_part(words_ptr, stride):
    """Return the number of a part that no program has taken."""
    return tl.atomic_add((words_ptr + stride).to(tl.pointer_type(tl.int32)), 1, sem="relaxed")


@triton.jit
def raise_own_amax(words_ptr, value):
    """Raise the amax of the whole tensor to that of a part; a maximum over nothing but NaN is NaN."""
    bits = tl.maximum(value, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(words_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def end_part(words_ptr, stride):
    """Tell the other programs that a part is done."""
    tl.debug_barrier()  # all threads have raised their amaxes
    tl.atomic_add((words_ptr + 2 * stride).to(tl.pointer_type(tl.int32)), 1, sem="acq_rel")


@triton.jit
def own_scales(scale, unseen, words_ptr, stride, parts, index, inside):
    """Wait for all parts; return scales, and instead of 0 those of the amaxes.

    Args:
        scale: [G] or one, as loaded. index: their places. inside: whether they are there; None: one is.
        parts: how many there are, and how many programs wait.
    """
    done = (words_ptr + 2 * stride).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(done, 0, sem="acquire")
    while seen < parts:
        seen = tl.atomic_add(done, 0, sem="acquire")
    amaxes = words_ptr.to(tl.pointer_type(tl.int32)) + index
    bits = tl.atomic_add(amaxes, 0, mask=inside, sem="relaxed")
    tl.debug_barrier()  # all threads have read
    if tl.atomic_add(done, 1, sem="acq_rel") == 2 * parts - 1:
        tl.atomic_xchg(amaxes, bits * 0, mask=inside, sem="relaxed")
        tl.atomic_xchg((words_ptr + stride).to(tl.pointer_type(tl.int32)), 0, sem="relaxed")
        tl.atomic_xchg(done, 0, sem="relaxed")
    return scale_or_first(scale, unseen, bits.to(tl.float32, bitcast=True))
