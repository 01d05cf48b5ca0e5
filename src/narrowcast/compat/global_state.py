"""Transformer Engine's ``FP8GlobalStateManager``, answered from the state of the thread."""

from __future__ import annotations

from typing import Any, cast

import torch

from .. import state
from .._device import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .._tracing import can_check, refuse_in_graphs
from ..state.delayed_scaling import renew
from .absent import why_absent

Support = tuple[bool, str]


def check_fp8_support() -> Support:
    """Return whether per-tensor FP8 GEMMs run natively here, and why not."""
    return cast(Support, is_fp8_available(return_reason=True))


def check_mxfp8_support() -> Support:
    """Return whether MXFP8 GEMMs run natively here, and why not."""
    return cast(Support, is_mxfp8_available(return_reason=True))


def check_nvfp4_support() -> Support:
    """Return whether NVFP4 GEMMs run natively here, and why not."""
    return cast(Support, is_nvfp4_available(return_reason=True))


def check_fp8_block_scaling_support() -> Support:
    """Return whether 128-block FP8 GEMMs run natively here, and why not."""
    return cast(Support, is_fp8_block_scaling_available(return_reason=True))


class _Named(type):
    """A metaclass: absent names raise with a reason; assignments raise, since nothing would read them."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(why_absent(cls.__name__, name))

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(
            f"{cls.__name__}.{name} cannot be assigned: the state belongs to the thread; enter narrowcast.autocast, or "
            f"use {cls.__name__}.set_autocast_state"
        )


class FP8GlobalStateManager(metaclass=_Named):
    """Queries and setters of the calling thread's autocast, by Transformer Engine's names.

    It has no state. The layers own delayed scales, so Transformer Engine's names for them are absent and raise
    AttributeError with the replacement.
    """

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_fp8_enabled = staticmethod(state.is_fp8_enabled)
    is_fp8_calibration = staticmethod(state.is_fp8_calibration)
    with_fp8_parameters = staticmethod(state.with_fp8_parameters)
    get_fp8_recipe = staticmethod(state.get_fp8_recipe)
    get_fp8_group = staticmethod(state.get_fp8_group)
    get_autocast_state = staticmethod(state.get_autocast_state)
    set_autocast_state = staticmethod(state.set_autocast_state)
    get_fp8_autocast_state = staticmethod(state.get_autocast_state)
    set_fp8_autocast_state = staticmethod(state.set_autocast_state)

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Return whether parameters created now keep their initial value in high precision."""
        return state.THREAD.state.init_preserve

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """Renew the scales of all that keeps them, as ``optimizer.step()`` does of its own.

        Over ranks nothing is reduced: ``narrowcast.reduce_delayed_scaling(model, group)`` does that, before this.

        Args:
            forward: without effect; inputs and gradients are renewed together.
        Raises:
            RuntimeError: in compiled code.
        """
        refuse_in_graphs(
            "FP8GlobalStateManager.reduce_and_update_fp8_tensors() belongs outside of compiled code"
        )
        renew(list(state.OWNERS))

    @staticmethod
    def is_first_fp8_module() -> bool:
        """Return True once in each outermost autocast of eager code, else False.

        Raises:
            RuntimeError: in compiled code, where a forward has no first time.
        """
        refuse_in_graphs(
            "FP8GlobalStateManager.is_first_fp8_module() differs from call to call, which a graph cannot; ask before "
            "the compiled function"
        )
        entered = state.THREAD.state.entered
        if not entered:
            return False
        outermost = entered[0]
        first = outermost.__dict__.get("first_module_asked")
        # the previous state distinguishes two entries of one instance
        outermost.__dict__["first_module_asked"] = outermost.previous
        return first is not outermost.previous

    @staticmethod
    def fp8_graph_capturing() -> bool:
        """Return whether the current stream is captured into a CUDA graph; False in compiled code."""
        return can_check() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def reset() -> None:
        """Leave every autocast and every ``quantized_model_init`` of this thread; layers keep their scales."""
        thread = state.THREAD.state
        thread.set(state.AutocastState().get())
        thread.recomputes, thread.restored = None, False
        thread.entered.clear()
        thread.init_entered.clear()
