"""``AllReduce``: the sum over all processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..collectives import group_name, sum_over
from ..context import OperationContext
from ..op import BasicOperation, TensorsToSave
from ..quantizer import BoundQuantizer


class AllReduce(BasicOperation):
    """Sums the inputs of all processes; every process passes on the gradient of its own output.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
    Raises:
        TypeError: no process group. RuntimeError: one without a registered name.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.group = group_name(process_group)

    def op_forward_compute(
        self,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> tuple[Tensor, TensorsToSave]:
        return sum_over(input_, self.group), ()

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: TensorsToSave,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> None:
        pass

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Tensor, tuple[()]]:
        return grad_output, ()
