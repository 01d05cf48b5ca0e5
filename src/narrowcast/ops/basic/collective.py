"""``AllGather``, ``AllReduce`` and ``ReduceScatter``: the rows of all processes, their sum, a share of that."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...functional.collectives import gather_rows, group_name, scatter_rows, sum_over
from ..context import OperationContext
from ..forms import SavesTensors
from ..handover import ScaledOperand
from ..op import BasicOperation, TensorsToSave


class CollectiveOperation(SavesTensors, BasicOperation):
    """Base of the collectives along the first dim, without parameters; a subclass communicates.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
    Raises:
        TypeError: no process group. RuntimeError: one without a registered name.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.group = group_name(process_group)

    def _forward(self, x: Any) -> Tensor:
        raise NotImplementedError

    def _backward(self, grad: Any) -> Tensor:
        raise NotImplementedError

    def op_forward_compute(
        self,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[Tensor, TensorsToSave]:
        return self._forward(input_), ()

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Tensor, tuple[()]]:
        return self._backward(grad_output), ()


class AllGather(CollectiveOperation):
    """Concatenates the inputs of all processes along the first dim, in order of rank; the gradient is summed and split.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
    Raises:
        TypeError: no process group. RuntimeError: one without a registered name.
    """

    def _forward(self, x: Any) -> Tensor:
        return gather_rows(x, self.group)

    def _backward(self, grad: Any) -> Tensor:
        return scatter_rows(grad, self.group)


class AllReduce(CollectiveOperation):
    """Sums the inputs of all processes; every process passes on the gradient of its own output.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
        reduce_in_backward: taken, and changes nothing, as in Transformer Engine: what every process computes from the
            sum has one gradient.
    Raises:
        TypeError: no process group. RuntimeError: one without a registered name.
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def _forward(self, x: Any) -> Tensor:
        return sum_over(x, self.group)

    def _backward(self, grad: Any) -> Tensor:
        return grad


class ReduceScatter(CollectiveOperation):
    """Sums the inputs of all processes and keeps this process's share of the rows; the gradient is gathered.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
    Raises:
        TypeError: no process group. RuntimeError: one without a registered name. ValueError: in forward, a first dim
        that does not divide among the processes.
    """

    def _forward(self, x: Any) -> Tensor:
        return scatter_rows(x, self.group)

    def _backward(self, grad: Any) -> Tensor:
        return gather_rows(grad, self.group)
