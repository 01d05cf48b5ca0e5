"""Quantization as an operation of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._checks import flags
from ..._tracing import can_return_quantized, is_eager
from ...autograd import DelayedScales
from ...functional import quantize
from ...quantizers import Operand
from ...recipe import LinearPlan, Mode, linear_plan
from ...roles import QuantizerRole
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..contract import TensorsToSave
from ..handover import ScaledOperand
from ..op import BasicOperation
from .inputs import plain, plain_input


class Quantize(BasicOperation):
    """Rounds its input to the format of its recipe or the current autocast's; without one it does nothing.

    If the next operation requests a quantized input, this is quantized once, as requested. Otherwise the next
    operation, or the caller, gets a quantized tensor. In compiled code, whose graphs pass plain tensors, it gets the
    values, also for unregistered quantizers, which no graph could take.

    Args:
        forward: act on the input, which the recipe quantizes as a layer's input.
        backward: act on the gradient, which the recipe quantizes as the gradient of a layer's output, unless it has a
            ``backward_override``.
        device: device of delayed scaling's state; default: the accelerator, or the CPU without one.
    Raises:
        TypeError: in forward, the input is not fp32, bf16 or fp16.
    """

    # It quantizes a gradient as the operation in front requests, which is observed before that.
    _passes_gradient = True

    def __init__(
        self, forward: bool = True, backward: bool = False, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        flags(forward=forward, backward=backward)
        self.quantizes_forward, self.quantizes_backward = bool(forward), bool(backward)
        # as the operation behind requests, which is observed before that
        self._passes_input = self.quantizes_forward
        self.quantizes_output, self.quantizes_grad_input = self.quantizes_forward, self.quantizes_backward
        self._add_delayed_state("", device)

    def num_quantizers(self, mode: Mode) -> int:
        return int(self.quantizes_forward if mode == "forward" else self.quantizes_backward)

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]:
        kind = "input" if mode == "forward" else "grad_output"
        return [QuantizerRole("linear", kind)] * self.num_quantizers(mode)

    def get_quantizer(self, mode: Mode, index: int) -> Operand | None:
        """Return how the one tensor of a mode is quantized, row-wise, as the current recipe says; None without a
        recipe.

        Raises:
            IndexError: this direction does not quantize, or ``index`` is not 0.
        """
        if super().get_quantizer(mode, index) is None:
            return None
        plan = self._plan()
        return plan.input if mode == "forward" else plan.grad_output

    def _plan(self) -> LinearPlan:
        return linear_plan(self._recipe_in_force(), "", False, False, module_type="linear")

    def forward_arguments(self, requires_grad: bool, input_requires_grad: bool) -> dict[str, Any]:
        plan = self._plan()
        # a layer that gets the quantized tensor reads its columns for the weight gradient
        return {"plan": plan, "columnwise": self._columns_are_read(), **self._state_arguments(plan)}

    def _columns_are_read(self) -> bool:
        """Return whether a backward may follow; the first run of a reentrant checkpoint records no gradients."""
        return torch.is_grad_enabled() or (self.training and is_eager())

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
        plan: LinearPlan | None = None,
        scales: DelayedScales | None = None,
        columnwise: bool = False,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        x = plain_input(input_)
        arguments = (
            {"plan": plan, "scales": scales, "columnwise": columnwise}
            if plan
            else self.forward_arguments(requires_grad, requires_grad)
        )
        chosen: LinearPlan = arguments["plan"]
        if not (self.quantizes_forward and chosen.quantized):
            return x, ()
        state: DelayedScales = arguments.get("scales") or DelayedScales()
        own = ScaledOperand(chosen.input, state.scale, state.amax)
        if next_op_input_quantizer is None and chosen.input.value and can_return_quantized():
            quantizer = chosen.input.quantizer.with_usage(rowwise=True, columnwise=arguments["columnwise"])
            return quantizer._assemble(quantize(x, quantizer, *own.state(x)), tuple(x.shape), x.dtype), ()
        return _rounded(x, next_op_input_quantizer, own), ()

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: TensorOrQuantized,
        tensors_to_save: TensorsToSave,
        *,
        plan: LinearPlan | None = None,
        **kwargs: Any,
    ) -> None:
        plan = plan or self._plan()
        rounds = self.quantizes_backward and plan.quantized and plan.backward_override is None
        # chosen here, since the backward runs outside autocast
        ctx.operand = plan.grad_output if rounds else None

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        grad = plain(grad_output)
        if ctx.operand is None:
            return grad, ()
        scales = ctx.scales or DelayedScales()
        own = ScaledOperand(ctx.operand, scales.scale, scales.amax)
        return _rounded(grad, ctx.prev_op_grad_output_quantizer, own), ()


def _rounded(x: Tensor, wanted: ScaledOperand | None, own: ScaledOperand) -> TensorOrQuantized:
    if wanted is not None:
        return wanted.quantize(x)
    return own.quantize(x).dequantize()
