"""Backwards that end with a :class:`BasicLinear`, F6 and F7: a gradient is added in place, or a factor joins its scale.

Current scaling gives ``scale * dy`` the codes of ``dy``, up to the rounding of their product that this leaves out. So a
constant factor goes into the scale of the quantized gradient, and no pass over memory applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...quantizers import Operand
from ...recipe import Recipe
from ...tensors import QuantizedTensorStorage, TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.moves import ConstantScale, MakeExtraOutput
from ..context import OperationContext
from ..contract import ExtraTensors, FusibleOperation, Gradients
from ..handover import ScaledOperand
from ..op import FusedOperation
from .forward_linear import added
from .pattern import Fusion, Match, Matched, NearMiss, exactly


class BackwardLinearAdd(FusedOperation, values=()):
    """``dx = dy w + grad_extra``; the gradient of the extra output itself is never written to."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> Gradients:
        linear: BasicLinear = self.basic_ops[1]  # type: ignore[assignment]
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        grad_input, grads = linear.op_backward(basic_op_ctxs[1], grad_output)
        if grad_input is not None and grad_extra is not None:
            grad_input = added(grad_input, grad_extra)
        return grad_input, [(), grads], [(), ()]


def _match_add(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, MakeExtraOutput, BasicLinear):
        return None
    first: Any = ops[start]
    linear: Any = ops[start + 1]
    if not first.in_place:
        return NearMiss("MakeExtraOutput has in_place=False")
    if linear.parallel.mode == "column":
        return NearMiss("the layer is column-parallel: its gradient is summed over processes first")
    return Match(2)


BACKWARD_LINEAR_ADD = Fusion("BackwardLinearAdd", "backward", _match_add, BackwardLinearAdd)


class BackwardLinearScale(FusedOperation, values=()):
    """``dx = (scale * dy) w`` and ``dw = (scale * dy)^T x`` from ``quantize(dy)``, whose one scale takes the factor."""

    def get_grad_output_quantizer(self) -> Operand | None:
        return self.basic_ops[0].get_grad_output_quantizer()

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        linear: BasicLinear = self.basic_ops[0]  # type: ignore[assignment]
        scale: float = self.basic_ops[1].scale  # type: ignore[assignment]
        grad: Any = _quantized(basic_op_ctxs[0].backward_args.plan.grad_output, grad_output)
        grad._scale_inv = grad._scale_inv * scale
        grad_input, grads = linear.op_backward(basic_op_ctxs[0], grad)
        return grad_input, [grads, ()], [(), ()]


def _quantized(operand: Operand, grad: TensorOrQuantized) -> QuantizedTensorStorage:
    """Return the gradient as the GEMMs read it, in a storage of our own; current scaling has no state."""
    if isinstance(grad, Tensor):
        return ScaledOperand(operand).quantize(grad)
    view = grad._view_of(("_data", "_transpose", "_scale_inv"))
    view._shape = tuple(grad.shape)
    return view


def _match_scale(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, ConstantScale):
        return None
    linear: Any = ops[start]
    if linear.parallel.mode == "column":
        return NearMiss("the layer is column-parallel: its gradient is summed over processes first")
    if linear.parallel.gathers_grad_output:
        return NearMiss("the layer is sequence-parallel: the gradient is gathered before it is quantized")
    if recipe is None or recipe.backward_override is not None:  # type: ignore[attr-defined]
        return NearMiss("the gradient stays in high precision and has no scale that could take the factor")
    if not recipe.float8_current_scaling() or recipe.fp8_quant_bwd_grad.power_2_scale:  # type: ignore[attr-defined]
        return NearMiss(
            "only current scaling with any scale gives scale * dy the codes of dy; blocks, powers of two and scales "
            "of earlier steps do not"
        )
    return Match(2)


BACKWARD_LINEAR_SCALE = Fusion("BackwardLinearScale", "backward", _match_scale, BackwardLinearScale)
