"""Parts that fused operations starting with a :class:`BasicLinear` share: its GEMM, and saving for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._tracing import can_overwrite
from ...tensors import TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.moves import check_extra_input
from ..context import OperationContext
from ..op import ExtraTensors, FusedOperation, FusibleOperation, TensorsToSave
from .pattern import Match, NearMiss


class ForwardLinearRun(FusedOperation):
    """Forward of a :class:`BasicLinear` and pointwise operations after it, of which only the first saves tensors.

    A :class:`Bias` is added where the GEMM ends; :meth:`finished` adds an extra input to what the GEMM made.
    """

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> tuple[Tensor, ExtraTensors, list[TensorsToSave]]:
        linear: BasicLinear = self._basic_ops[0]  # type: ignore[assignment]
        second = self._basic_ops[1]
        bias = second.bias if isinstance(second, Bias) else None
        extra = basic_op_extra_inputs[-1][0] if basic_op_extra_inputs[-1] else None
        if extra is not None:
            check_extra_input(extra, "the output of the linear layer", linear.output_shape(input_))
        out, to_save = linear.compute(input_, bias, **basic_op_kwargs[0])
        if extra is not None:
            out = self.finished(out, extra)
        others = len(self._basic_ops) - 1
        return out, [()] * (1 + others), [to_save, *[()] * others]

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        """Return the output, from the GEMM's and the extra input; may write to the former."""
        raise NotImplementedError(f"{type(self).__name__} takes no extra input")

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        linear: BasicLinear = self._basic_ops[0]  # type: ignore[assignment]
        linear.op_forward_save_ctx(
            basic_op_ctxs[0], input_, tensors_to_save[0], **kwargs, **basic_op_kwargs[0]
        )
        # the others' inputs do not exist; they only read the dtype
        between = basic_op_ctxs[0].backward_args
        for index in range(1, len(self._basic_ops)):
            self._basic_ops[index].fuser_forward_save_ctx(
                [basic_op_ctxs[index]],
                between,
                [tensors_to_save[index]],
                basic_op_extra_inputs=[basic_op_extra_inputs[index]],
                basic_op_kwargs=[basic_op_kwargs[index]],
                **kwargs,
            )


def exactly(ops: Sequence[FusibleOperation], start: int, *kinds: type) -> bool:
    """Return whether the operations from ``start`` on are of these classes; a subclass may compute something else."""
    return tuple([type(op) for op in ops[start : start + len(kinds)]]) == kinds


def may_add(ops: Sequence[Any], start: int, length: int) -> Match | NearMiss:
    """Return whether the extra input that a run ends with may be added to what the GEMM it begins with makes."""
    if ops[start].parallel.mode == "row":
        return NearMiss("the layer is row-parallel: what follows it comes behind the sum over processes")
    if not ops[start + length - 1].in_place:
        return NearMiss("AddExtraInput has in_place=False")
    return Match(length)


def added(out: Tensor, other: Tensor) -> Tensor:
    """Return ``out + other``; eager code writes it to ``out``, which must be the caller's own."""
    if not can_overwrite() or out.dtype != other.dtype:
        return out + other
    return out.add_(other)
