"""Quantized matrices of layers, as their forward's GEMM reads them, in the form of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..convert.experts import StackedExpertsLayer
from ..layers import GroupedLinearLayer, Stage
from ..layers.fitted_scales import fitted_to_weights
from ..quantizers import Operand, buffers_of
from ..recipe import WEIGHT_SLOT, linear_plan
from ..tensors import GroupedTensor, QuantizedTensor, grouped_storage_of
from .formats import WeightFormat


def shape_of(layer: Any, stage: Stage) -> tuple[int, int]:
    """Return (N, K) of each matrix of a stage."""
    parts = layer._parts_of(stage.weight)
    rows, columns = parts[0].shape[-2:]
    if isinstance(layer, StackedExpertsLayer) and layer.stack_of(layer).transposed:
        return columns, rows
    return rows if isinstance(layer, GroupedLinearLayer) else sum(part.shape[-2] for part in parts), columns


def packed(
    layer: Any, stage: Stage, group: int, operand: Operand, written_as: WeightFormat
) -> dict[str, Tensor]:
    """Return a matrix as it is served, by what is put after its key."""
    matrix = _matrix(layer, stage, group)
    return written_as.pack(
        _buffers(layer, stage, group, matrix, operand), tuple(matrix.shape), operand.quantizer
    )


def _matrix(layer: Any, stage: Stage, group: int) -> Any:
    """Return one matrix (N, K) of a stage."""
    if isinstance(layer, StackedExpertsLayer):
        expert = getattr(layer, stage.weight).detach()[group]
        return expert.t() if layer.stack_of(layer).transposed else expert
    if isinstance(layer, GroupedLinearLayer):
        parts = layer._parts_of(stage.weight)
        if len(parts) > 1 or layer.num_gemms == 1:
            part = parts[group].detach()
            return part[0] if part.dim() == 3 else part
        if isinstance(parts[0], GroupedTensor):
            return grouped_storage_of(parts[0]).split_into_quantized_tensors()[group]
        return parts[0].detach()[group]
    return layer._whole(stage.weight).detach()


def _buffers(layer: Any, stage: Stage, group: int, weight: Any, operand: Operand) -> list[Tensor]:
    """Return row-wise data and scales of a matrix."""
    if not isinstance(weight, Tensor):
        return buffers_of(weight).rowwise
    if isinstance(weight, QuantizedTensor):
        stored = buffers_of(weight)
        if stored.quantizer._format_layout() is operand.quantizer._format_layout():
            return stored.rowwise
        weight = weight.dequantize()
    return operand.quantize(weight, _scale(layer, stage, group) if operand.delayed else None).rowwise


def _scale(layer: Any, stage: Stage, group: int) -> Tensor:
    """Return the scales of delayed scaling that an evaluation has, with this group's in the weight's slot.

    Raises:
        ValueError: there are none yet.
    """
    scale = getattr(layer, f"{stage.prefix}scale_fwd")
    if scale is None:
        raise ValueError(
            f"{layer.name or stage.weight} has no scales of delayed scaling yet; run the model once"
        )
    plan = linear_plan(layer.recipe, stage.name, False, False, module_type=layer._module_type)
    if plan.forward_state is not None:
        scale = fitted_to_weights(layer, stage.prefix, plan.forward_state, plan, scale)
    return scale[WEIGHT_SLOT * layer._groups + group].expand(WEIGHT_SLOT + 1).contiguous()
