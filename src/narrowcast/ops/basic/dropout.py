"""Dropout."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..._checks import numbers
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..contract import TensorsToSave
from ..handover import ScaledOperand
from ..op import BasicOperation
from .inputs import plain, plain_input


class Dropout(BasicOperation, values=("p", "training")):
    """While training, ``y = x * mask / (1 - p)`` with a random mask that is 0 with probability ``p``; else ``y = x``.

    Takes (*lead, K), gives the same shape and dtype. The mask is PyTorch's, drawn from its generator and kept for the
    backward, one byte per element.

    Args:
        p: probability of dropping an element, between 0 and 1.
    Raises:
        ValueError: ``p`` outside that.
    """

    def __init__(self, p: float) -> None:
        numbers(p=p)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p is {p}; use a probability between 0 and 1")
        super().__init__()
        self.p = float(p)

    def implementation(
        self, training: bool, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Literal["identity", "mask"]:
        """Return the implementation for a tensor: "identity", which saves nothing, or "mask".

        The one place that decides: forward and backward ask here, or store what was said.
        """
        return "mask" if training and self.p > 0.0 else "identity"

    def _chosen(self, input_: Any) -> str:
        return self.implementation(self.training, input_.numel(), input_.dtype, input_.device)

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        x = plain_input(input_)
        if self._chosen(input_) == "identity":
            return x, ()
        output, mask = torch.native_dropout(x, self.p, True)
        return output, (mask,) if requires_grad else ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: TensorOrQuantized, tensors_to_save: TensorsToSave, **kwargs: Any
    ) -> None:
        ctx.implementation = self._chosen(input_)  # type: ignore[attr-defined]
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        grad = plain(grad_output)
        if ctx.implementation == "identity":  # type: ignore[attr-defined]
            return grad, ()
        (mask,) = ctx.saved_tensors
        scale = 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)
        return torch.ops.aten.native_dropout_backward.default(grad, mask, scale), ()
