"""Operands of a linear layer's GEMMs: quantized, saved for the backward, and read there again.

A weight is one tensor (N, K). For groups of rows it is a list, G of (N, K) or one (G, N, K), and :mod:`.groups` has the
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import a_kind
from .._tracing import after, record
from ..functional import (
    dequantize,
    draw_seed,
    grouped_dequantize,
    grouped_quantize_keeping_amax,
    quantize,
    quantize_keeping_amax,
)
from ..quantizers import OperandBuffers, Quantizer, buffers_of
from ..tensors import Float8TensorStorage, QuantizedTensorStorage, grouped_layout, transposed
from .arguments import LinearBwdArgs, LinearFwdArgs
from .groups import GroupedRows, by_direction, quantize_weights


class SavedOperand(NamedTuple):
    """The data of an operand for the backward: its buffers of one direction, or one high-precision tensor."""

    tensors: list[Tensor]
    quantizer: Quantizer | None


def rows_of(tensor: Any) -> int:
    """Compute the product of all dims but the last."""
    rows = 1
    for size in tensor.shape[:-1]:
        rows = rows * size
    return rows


def with_columnwise(storage: QuantizedTensorStorage) -> OperandBuffers:
    """Return buffers of a storage with column-wise data; per-tensor FP8 has its codes transposed where it lacks them.

    Raises:
        RuntimeError: the format cannot make one direction from the other.
    """
    operand = buffers_of(storage)
    if operand.columnwise:
        return operand
    if not isinstance(storage, Float8TensorStorage):
        raise RuntimeError(
            f"the quantized input is {a_kind(storage)} without column-wise data, which the weight gradient "
            "needs; quantize it with columnwise=True"
        )
    return OperandBuffers(
        operand.rowwise, transposed(operand.rowwise, operand.rowwise[0].shape[-1]), operand.quantizer
    )


def plain_or_rowwise(tensor: Any) -> SavedOperand:
    """Return a tensor as a high-precision backward reads it; weights of groups are returned as saved."""
    if isinstance(tensor, list):
        return SavedOperand(tensor, None)
    if isinstance(tensor, QuantizedTensorStorage):
        operand = buffers_of(tensor)
        return SavedOperand(operand.rowwise, operand.quantizer)
    return SavedOperand([tensor], None)


def saved_operand(
    operand: OperandBuffers, high_precision: Any, needed: bool, override: str | None
) -> SavedOperand:
    """Return the data of an operand that the backward reads.

    Args:
        operand: as fprop read it.
        high_precision: what it was made from, for a backward that reads that.
        needed: whether any gradient reads it.
    """
    if not needed:
        return record(SavedOperand, ([], None))
    if override == "high_precision":
        if high_precision is None:
            return SavedOperand(operand.rowwise, operand.quantizer)
        return plain_or_rowwise(high_precision)
    kept = operand.columnwise if override is None and operand.columnwise else operand.rowwise
    return record(SavedOperand, (kept, operand.quantizer))


def saved_operands(args: LinearFwdArgs, tensors: Sequence[Any]) -> tuple[SavedOperand, SavedOperand]:
    """Return the input and the weight that a forward saved as ``tensors``, those of the input up to a None."""
    plan, end = args.plan, 0
    while end < len(tensors) and tensors[end] is not None:
        end += 1
    of_input, of_weight = plan.input.quantizer, plan.weight.quantizer
    if args.workspace is not None:
        of_weight = args.workspace.quantizer
    elif plan.dgrad_weight is not None:
        of_weight = None
    if not plan.quantized or plan.backward_override == "high_precision":
        of_input = of_weight = None
    elif plan.save_original_input and plan.backward_override is None:
        of_input = None
    return SavedOperand([*tensors[:end]], of_input), SavedOperand([*tensors[end + 1 :]], of_weight)


def weight_operand(weight: Any, args: LinearFwdArgs) -> tuple[OperandBuffers, SavedOperand]:
    """Return the weight as fprop reads it, and what to save of it for dgrad.

    A workspace is read as it is, unless it has no row-wise data. Else the weight is quantized for fprop alone: saved is
    the parameter itself, which is there anyway, with the maxima that give the same codes once more.

    Args:
        weight: (N, K), of groups a list; None if there is a workspace and nothing else.
    """
    plan, workspace = args.plan, args.workspace
    if workspace is not None and (weight is None or workspace.rowwise):
        return workspace, saved_operand(workspace, weight, plan.needs_input, plan.backward_override)
    operand, repeated, grouped = plan.weight, plan.dgrad_weight, isinstance(weight, list)
    saved, original = [*weight] if grouped else [weight], weight
    if args.stored is not None:
        saved = args.stored.rowwise
        whole = weight[0] if grouped else weight
        whole = _decoded(saved, args.stored.quantizer, whole.dtype, whole.shape)
        weight = [whole] if grouped else whole
    if repeated is not None and repeated.current:
        if grouped:
            *buffers, amax = grouped_quantize_keeping_amax(weight, operand.quantizer)
        else:
            *buffers, amax = quantize_keeping_amax(weight, operand.quantizer)
        w = by_direction(buffers, operand) if grouped else operand.split(buffers)
        return w, record(SavedOperand, ([*saved, amax], None))
    if grouped:
        w = quantize_weights(weight, operand)
    else:
        seed = draw_seed(weight) if operand.stochastic else None
        w = operand.split(quantize(weight, operand.quantizer, seed))
    if w.columnwise:  # made only where dgrad reads it
        return w, record(SavedOperand, (w.columnwise, w.quantizer))
    if repeated is None:
        return w, saved_operand(w, original, plan.needs_input, plan.backward_override)
    return w, record(SavedOperand, (saved, None))


def _decoded(codes: list[Tensor], quantizer: Quantizer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the values of a weight (N, K), or of those of all groups (G, N, K), stored row-wise."""
    if len(shape) == 2:
        return dequantize(codes, quantizer, False, dtype, list(shape))
    layout = grouped_layout(quantizer._storage_name)
    return grouped_dequantize(codes, quantizer, layout, None, dtype, list(shape))


def weight_of_dgrad(
    args: LinearBwdArgs, saved: list[Tensor], grouped: GroupedRows | None = None, grad: Tensor | None = None
) -> tuple[list[Tensor], Quantizer]:
    """Return the column-wise weight and what reads it, from what :func:`weight_operand` saved.

    Args:
        grad: a buffer of the gradient; a graph decodes or transposes codes only once it is there.
    """
    quantizer, repeated = args.saved_weight[1], args.plan.dgrad_weight
    if quantizer is None and repeated is not None:
        amax = None
        if repeated.current:
            *saved, amax = saved
        if args.stored is not None:
            # depends on the gradient, or the compiler would save what the forward has decoded
            codes = [*saved[:-1], after(grad, saved[-1])]
            shape = args.shape if grouped is None else (grouped.groups.count, *args.shape)
            saved = [_decoded(codes, args.stored, args.weight_dtype, shape)]
        if grouped is not None:
            return quantize_weights(saved, repeated, None, amax).columnwise, repeated.quantizer
        return quantize(saved[0], repeated.quantizer, None, None, amax), repeated.quantizer
    if grouped is not None:
        return grouped.columnwise_weights(args, saved, grad), quantizer  # type: ignore[return-value]
    columnwise = transposed(saved, args.shape[1], grad) if args.transpose_weight else saved
    return columnwise, quantizer  # type: ignore[return-value]


def in_high_precision(saved: SavedOperand, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return the values of a saved operand."""
    if saved.quantizer is not None:
        return dequantize(saved.tensors, saved.quantizer, False, dtype, list(shape))
    return saved.tensors[0].reshape(shape).to(dtype)
