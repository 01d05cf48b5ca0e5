"""The scale of a tensor's own amax, found by the launch that casts it: for delayed scaling that has seen nothing yet.

No code can be written before all of the tensor was read, and the programs of a launch do not all run at once. So each
takes parts of the tensor, in order, until none is left, and then waits until all parts are done. Programs that run have
taken them, and none of these waits before its part is done. Afterwards every program reads its own part again and casts
it. A program waits only while the scale is negative, so later launches of the same code find a branch that is not
taken.

The words of this are rows of ``reference.delayed.copy_scales`` after the scales: amax, parts taken, parts done. The
last program sets them to 0 again: a backward may cast with the same copy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scaling import scale_or_own

ROWS_AT_ONCE = tl.constexpr(16)
"""Rows of a part that are loaded at once: with more, the branch would need more registers than the cast."""


@triton.jit
def take_part(scale_ptr, stride):
    """Return the number of a part that no program has taken."""
    return tl.atomic_add((scale_ptr + 2 * stride).to(tl.pointer_type(tl.int32)), 1, sem="relaxed")


@triton.jit
def raise_own_amax(scale_ptr, stride, value):
    """Raise the amax of the whole tensor to that of a part; a maximum over nothing but NaN is NaN."""
    bits = tl.maximum(value, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max((scale_ptr + stride).to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def end_part(scale_ptr, stride):
    """Tell the other programs that a part is done."""
    tl.debug_barrier()  # all threads have raised their amaxes
    tl.atomic_add((scale_ptr + 3 * stride).to(tl.pointer_type(tl.int32)), 1, sem="acq_rel")


@triton.jit
def own_scales(scale, scale_ptr, stride, parts, index, inside):
    """Wait for all parts; return scales, and instead of negative ones those of the amaxes.

    Args:
        scale: [G] or one, as loaded. index: their places. inside: whether they are there; None: one is.
        parts: how many there are, and how many programs wait.
    """
    done = (scale_ptr + 3 * stride).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(done, 0, sem="acquire")
    while seen < parts:
        seen = tl.atomic_add(done, 0, sem="acquire")
    amaxes = (scale_ptr + stride).to(tl.pointer_type(tl.int32)) + index
    bits = tl.atomic_add(amaxes, 0, mask=inside, sem="relaxed")
    tl.debug_barrier()  # all threads have read
    if tl.atomic_add(done, 1, sem="acq_rel") == 2 * parts - 1:
        tl.atomic_xchg(amaxes, bits * 0, mask=inside, sem="relaxed")
        tl.atomic_xchg((scale_ptr + 2 * stride).to(tl.pointer_type(tl.int32)), 0, sem="relaxed")
        tl.atomic_xchg(done, 0, sem="relaxed")
    return scale_or_own(scale, bits.to(tl.float32, bitcast=True))
