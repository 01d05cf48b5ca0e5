"""Transformer Engine's context of code that recomputes by means of its own, such as Megatron-LM's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..state import THREAD


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Run a forward that is recomputed later, and again its recomputation.

    Nothing has to be kept for the recomputation: forwards and backwards only read scales and raise amax, so a layer
    that runs twice gives what it gave, and leaves what it left. Inside, ``is_fp8_activation_recompute_enabled`` and
    ``in_fp8_activation_recompute_phase`` answer as inside of ``narrowcast.checkpoint``.

    Args:
        activation_recompute: whether the forward is recomputed at all.
        recompute_phase: whether this is the recomputation.
    """
    previous = THREAD.state.recomputes
    THREAD.state.recomputes = recompute_phase if activation_recompute else None
    try:
        yield
    finally:
        THREAD.state.recomputes = previous
