"""Transformer Engine's context of code that recomputes by means of its own, such as Megatron-LM's."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from ..state import THREAD


class activation_recompute_forward(ContextDecorator):
    """Around a forward that is recomputed later, and again around its recomputation.

    Nothing has to be kept for the recomputation: forwards and backwards only read scales and raise amax, so a layer
    that runs twice gives what it gave, and leaves what it left. Inside, ``is_fp8_activation_recompute_enabled`` and
    ``in_fp8_activation_recompute_phase`` answer as inside of ``narrowcast.checkpoint``.

    Args:
        activation_recompute: whether the forward is recomputed at all.
        recompute_phase: whether this is the recomputation.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.recomputes = recompute_phase if activation_recompute else None
        self.previous: list[bool | None] = []

    def __enter__(self) -> None:
        self.previous.append(THREAD.state.recomputes)
        THREAD.state.recomputes = self.recomputes

    def __exit__(self, *exception: Any) -> None:
        THREAD.state.recomputes = self.previous.pop()
