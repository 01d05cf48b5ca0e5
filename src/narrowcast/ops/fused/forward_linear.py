"""Forwards that begin with a :class:`BasicLinear` and finish where its GEMM ends: F2, F3 and F4.

The name of F3 is the upstream project's, which has no activation in it either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._tracing import can_overwrite
from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.moves import AddExtraInput, ConstantScale, check_extra_input
from ..context import OperationContext
from ..contract import ExtraTensors, FusibleOperation, TensorsToSave
from ..op import FusedOperation
from .pattern import Fusion, Match, Matched, NearMiss, exactly


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
        out, to_save = linear.compute(input_, bias, basic_op_kwargs[0]["args"])
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


class ForwardLinearBiasAdd(ForwardLinearRun, values=()):
    """``y = (x w^T + bias) + extra``; the extra input itself is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        return added(out, extra)


def _match_bias_add(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if exactly(ops, start, BasicLinear, Bias, AddExtraInput):
        return _may_add(ops, start, 3)
    return _may_add(ops, start, 2) if exactly(ops, start, BasicLinear, AddExtraInput) else None


FORWARD_LINEAR_BIAS_ADD = Fusion("ForwardLinearBiasAdd", "forward", _match_bias_add, ForwardLinearBiasAdd)


class ForwardLinearBiasActivation(ForwardLinearRun, values=()):
    """``y = x w^T + bias``, rounded once where the GEMM can."""


def _match_bias_activation(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if not exactly(ops, start, BasicLinear, Bias):
        return None
    linear: Any = ops[start]
    if linear.parallel.mode == "row":
        return NearMiss("the layer is row-parallel: its bias comes behind the sum over processes")
    if linear.weight.dtype not in (torch.float16, torch.bfloat16):
        return NearMiss(f"the weight is {linear.weight.dtype}; the GEMM adds a bias in fp16 and bf16")
    return Match(2)


FORWARD_LINEAR_BIAS_ACTIVATION = Fusion(
    "ForwardLinearBiasActivation", "forward", _match_bias_activation, ForwardLinearBiasActivation
)


class ForwardLinearScaleAdd(ForwardLinearRun, values=()):
    """``y = scale * (x w^T) + extra``, product and sum rounded together; the extra input is never written to."""

    def finished(self, out: Tensor, extra: Tensor) -> Tensor:
        scale: float = self.basic_ops[1].scale  # type: ignore[assignment]
        return torch.add(extra, out, alpha=scale)


def _match_scale_add(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    return _may_add(ops, start, 3) if exactly(ops, start, BasicLinear, ConstantScale, AddExtraInput) else None


FORWARD_LINEAR_SCALE_ADD = Fusion("ForwardLinearScaleAdd", "forward", _match_scale_add, ForwardLinearScaleAdd)


def _may_add(ops: Sequence[Any], start: int, length: int) -> Match | NearMiss:
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
