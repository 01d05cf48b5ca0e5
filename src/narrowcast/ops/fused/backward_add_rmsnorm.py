"""F9: gradients of an extra output and of the RMSNorm after it, added in the norm's kernel before it rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.moves import MakeExtraOutput
from ..basic.norm import RMSNorm, norm_gradients
from ..context import OperationContext
from ..contract import ExtraTensors, FusibleOperation, Gradients
from ..op import FusedOperation
from .pattern import Fusion, Match, Matched, NearMiss, follows


class BackwardAddRMSNorm(FusedOperation, values=()):
    """``dx = norm_backward(grad) + grad_extra``, rounded once, quantized on the previous operation's request."""

    quantizes_grad_input = True

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> Gradients:
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        norm: Any = self.basic_ops[1]
        wanted = basic_op_ctxs[0].prev_op_grad_output_quantizer
        centered = norm.settings.zero_centered_gamma
        dx, dweight, _ = norm_gradients(basic_op_ctxs[1], grad_output, centered, wanted, grad_extra)
        return dx, [(), (dweight,)], [(), ()]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not follows(ops, start, MakeExtraOutput, RMSNorm):
        return None
    if ops[start].in_place:  # type: ignore[attr-defined]
        return NearMiss("MakeExtraOutput has in_place=True, which belongs to BackwardLinearAdd")
    return Match(2)


BACKWARD_ADD_RMSNORM = Fusion("BackwardAddRMSNorm", "backward", _match, BackwardAddRMSNorm)
