"""A bias summed where the gradient is quantized for the linear layer in front, in the layer's own stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..context import OperationContext
from ..op import ExtraTensors, FusedOperation, FusibleOperation, ParameterGradients
from .linear_run import exactly
from .pattern import Fusion, Match, Matched, NearMiss


class BackwardLinearBias(FusedOperation):
    """``dx = dy w``, ``dw = dy^T x`` and the sums of ``dy``, as :class:`narrowcast.Linear` computes them."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> tuple[TensorOrQuantized | None, ParameterGradients, ExtraTensors]:
        linear: BasicLinear = self.basic_ops[0]  # type: ignore[assignment]
        of_linear, of_bias = basic_op_ctxs
        dtype = of_bias.bias_dtype if of_bias.with_grad_bias else None
        grad_input, grad_weight, grad_bias = linear.gradients(of_linear, grad_output, dtype)
        return grad_input, [(grad_weight,), (grad_bias,)], [(), ()]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, Bias):
        return None
    linear: Any = ops[start]
    if linear.parallel.gathers_grad_output:
        return NearMiss("the layer is sequence-parallel: the gradient is gathered before it is quantized")
    if recipe is None:
        return NearMiss("no recipe is in force, so nothing is quantized")
    if recipe.backward_override is not None:  # type: ignore[attr-defined]
        return NearMiss(f"backward_override={recipe.backward_override!r} leaves gradients unquantized")  # type: ignore[attr-defined]
    return Match(2)


BACKWARD_LINEAR_BIAS = Fusion("BackwardLinearBias", "backward", _match, BackwardLinearBias)
