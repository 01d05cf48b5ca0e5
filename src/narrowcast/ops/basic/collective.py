"""``AllGather``, ``AllReduce`` and ``ReduceScatter``: the rows of all processes, their sum, a share of that."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...functional.collectives import gather_rows, group_name, scatter_rows, sum_over
from ..context import OperationContext
from ..contract import TensorsToSave
from ..forward_forms import SavesTensors
from ..handover import ScaledOperand
from ..op import BasicOperation


class CollectiveOperation(SavesTensors, BasicOperation):
    """Base of the collectives along the first dim, without parameters; a subclass names what runs each way.

    Args:
        process_group: the processes; None is the default group. With one process this is the identity.
    Raises:
        TypeError: no process group.
        RuntimeError: one without a registered name.
    """

    # functions of a tensor and the group
    _collective: Any
    _collective_back: Any

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.group = group_name(process_group)

    def op_forward_compute(
        self,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[Tensor, TensorsToSave]:
        return self._collective(input_, self.group), ()

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Tensor, tuple[()]]:
        return self._collective_back(grad_output, self.group), ()


class AllGather(CollectiveOperation):
    """Concatenates the inputs of all processes along the first dim, in order of rank; the gradient is summed and split.

    Arguments and errors are those of :class:`~narrowcast.ops.basic.collective.CollectiveOperation`.
    """

    _collective, _collective_back = staticmethod(gather_rows), staticmethod(scatter_rows)


class AllReduce(CollectiveOperation):
    """Sums the inputs of all processes; every process passes on the gradient of its own output.

    Args:
        process_group: as in :class:`~narrowcast.ops.basic.collective.CollectiveOperation`; so are the errors.
        reduce_in_backward: accepted, without effect, as in Transformer Engine: the sum has one gradient on all
            processes.
    """

    _collective, _collective_back = staticmethod(sum_over), staticmethod(lambda grad, group: grad)

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)


class ReduceScatter(CollectiveOperation):
    """Sums the inputs of all processes and keeps this process's row shard; the gradient is gathered.

    Arguments and errors are those of :class:`~narrowcast.ops.basic.collective.CollectiveOperation`.

    Raises:
        ValueError: in forward, the first dim does not divide among the processes.
    """

    _collective, _collective_back = staticmethod(scatter_rows), staticmethod(gather_rows)
