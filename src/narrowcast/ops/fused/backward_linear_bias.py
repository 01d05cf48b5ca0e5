"""A bias summed where the gradient is quantized for the linear layer in front, in the layer's own stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..context import OperationContext
from ..op import FusedOperation, FusibleOperation, Gradients
from .linear_run import exactly
from .pattern import Fusion, Match, Matched, kept_in_high_precision


class BackwardLinearBias(FusedOperation):
    """``dx = dy w``, ``dw = dy^T x`` and the sums of ``dy``, as :class:`narrowcast.Linear` computes them."""

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        linear: BasicLinear = self.basic_ops[0]  # type: ignore[assignment]
        of_linear, of_bias = basic_op_ctxs
        dtype = of_bias.bias_dtype if of_bias.with_grad_bias else None
        grad_input, grad_weight, grad_bias = linear.gradients(of_linear, grad_output, dtype)
        return grad_input, [(grad_weight,), (grad_bias,)], [(), ()]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, Bias):
        return None
    return kept_in_high_precision(ops[start], recipe) or Match(2)


BACKWARD_LINEAR_BIAS = Fusion("BackwardLinearBias", "backward", _match, BackwardLinearBias)
