"""Quantization as an operation of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...recipe import Mode
from ...state import STATE
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..op import BasicOperation, TensorsToSave
from ..quantizer import BoundQuantizer
from .inputs import plain, plain_input


class Quantize(BasicOperation):
    """Rounds what passes to what the recipe in force can represent; outside of ``autocast`` it does nothing.

    The operation that gets the result may have asked for it quantized: then it is quantized as asked, once. Else the
    quantized values are handed on in the input's dtype.

    Args:
        forward: act on the input, which the recipe quantizes as a layer's input.
        backward: act on the gradient, which the recipe quantizes as the gradient of a layer's output, unless it has a
            ``backward_override``.
        device: where the state of delayed scaling lives; default: the accelerator, or the CPU without one.
    Raises:
        TypeError: in forward, an input that is not fp32, bf16 or fp16.
    """

    def __init__(
        self, forward: bool = True, backward: bool = False, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.quantizes_forward, self.quantizes_backward = bool(forward), bool(backward)
        self.quantizes_output, self.quantizes_grad_input = self.quantizes_forward, self.quantizes_backward
        self._add_delayed_state("", device)

    def extra_repr(self) -> str:
        """Directions, as printed by the module."""
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}"

    def num_quantizers(self, mode: Mode) -> int:
        return int(self.quantizes_forward if mode == "forward" else self.quantizes_backward)

    def get_quantizer(self, mode: Mode, index: int) -> BoundQuantizer | None:
        """Quantizer of the one tensor of a mode, row-wise, as the recipe in force makes it; None without a recipe.

        Raises:
            IndexError: this direction does not quantize, or ``index`` is not 0.
        """
        if not 0 <= index < self.num_quantizers(mode):
            raise IndexError(
                f"{self!r} has {self.num_quantizers(mode)} {mode} quantizers; there is no number {index}"
            )
        recipe = STATE.recipe
        if recipe is None:
            return None
        handles, state = recipe.linear_handles(), self.delayed_scaling
        handle = (handles.input if mode == "forward" else handles.grad_output).rowwise
        if not handle.delayed:
            return BoundQuantizer(handle)
        if not torch.compiler.is_compiling():
            state.note(recipe, True)
        if mode == "forward":
            return BoundQuantizer(handle, state.scale_fwd, state.amax_history_fwd)
        return BoundQuantizer(handle, state.scale_bwd, state.amax_history_bwd)

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        x = plain_input(input_)
        own = self.get_quantizer("forward", 0) if self.quantizes_forward else None
        return (x if own is None else _rounded(x, next_op_input_quantizer, own)), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: TensorOrQuantized, tensors_to_save: TensorsToSave, **kwargs: Any
    ) -> None:
        # chosen here, because the backward runs outside of autocast
        ctx.quantizer = self._gradient_quantizer()  # type: ignore[attr-defined]

    def _gradient_quantizer(self) -> BoundQuantizer | None:
        recipe = STATE.recipe
        if not self.quantizes_backward or recipe is None or recipe.backward_override is not None:  # type: ignore[attr-defined]
            return None
        return self.get_quantizer("backward", 0)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        grad, own = plain(grad_output), ctx.quantizer  # type: ignore[attr-defined]
        return (grad if own is None else _rounded(grad, ctx.prev_op_grad_output_quantizer, own)), ()


def _rounded(x: Tensor, wanted: BoundQuantizer | None, own: BoundQuantizer) -> TensorOrQuantized:
    if wanted is not None:
        return wanted.quantize(x)
    return own.quantize(x).dequantize()
