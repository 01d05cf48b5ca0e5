"""The scales that one forward of a layer reads: copies, so that a later renewal changes nothing for its backward."""

from __future__ import annotations

from torch import Tensor

from ..state import DelayedSlots, renew_and_read, scales_of, scales_of_traced

States = tuple[DelayedSlots | None, DelayedSlots | None]
"""Of a stage: forward and backward."""


def copies_of(states: list[States], renews: bool | None) -> list[Tensor]:
    """Return copies of the scales of stages, renewed first where that is up to the layer."""
    present = [state for stage in states for state in stage if state is not None]
    return renew_and_read(present) if renews else scales_of(present)


def traced_copies(states: list[States], renews: bool | None, recorded: bool, root: str) -> list[Tensor]:
    """Return :func:`copies_of` in a graph, of a forward in training or with gradients."""
    present = [state for stage in states for state in stage if state is not None]
    return scales_of_traced(present, bool(renews), recorded, root)


def by_stage(states: list[States], copies: list[Tensor]) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return the copies of each stage, forward and backward."""
    of_stages, place = [], 0
    for fwd, bwd in states:
        of_bwd = place + (fwd is not None)
        of_stages.append((None if fwd is None else copies[place], None if bwd is None else copies[of_bwd]))
        place = of_bwd + (bwd is not None)
    return of_stages
