"""F6: the gradient of an extra output added in place to what the next GEMM makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.moves import MakeExtraOutput
from ..context import OperationContext
from ..op import ExtraTensors, FusedOperation, FusibleOperation, Gradients
from .linear_run import added, exactly
from .pattern import Fusion, Match, Matched, NearMiss


class BackwardLinearAdd(FusedOperation):
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
        grad_input, grad_weight, _ = linear.gradients(basic_op_ctxs[1], grad_output)
        if grad_input is not None and grad_extra is not None:
            grad_input = added(grad_input, grad_extra)
        return grad_input, [(), (grad_weight,)], [(), ()]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, MakeExtraOutput, BasicLinear):
        return None
    first: Any = ops[start]
    linear: Any = ops[start + 1]
    if not first.in_place:
        return NearMiss("MakeExtraOutput has in_place=False")
    if linear.parallel.mode == "column":
        return NearMiss("the layer is column-parallel: its gradient is summed over processes first")
    return Match(2)


BACKWARD_LINEAR_ADD = Fusion("BackwardLinearAdd", "backward", _match, BackwardLinearAdd)
