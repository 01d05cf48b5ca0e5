"""Quantized matrices of layers, as their forward's GEMM reads them, in the form of a checkpoint.

A matrix is in one piece, or in several: one for each parameter that its rows are parts of. FSDP2 shards a piece by
rows, tensor parallelism splits the matrix of a layer by rows or columns, and ``shards.py`` joins what ranks quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..convert.experts import StackedExpertsLayer
from ..distributed.together import Together
from ..layers import GroupedLinearLayer, Stage
from ..quantizers import Operand, buffers_of
from ..reference.scaling import reciprocal
from ..tensors import QuantizedTensor
from ..upstream.fsdp import is_distributed
from .formats import Packed, WeightFormat
from .shards import Piece, gather_piece, gather_split, quantize_pieces, split_of


def shape_of(layer: Any, stage: Stage) -> tuple[int, int]:
    """Return (N, K) of each matrix of a stage, over all ranks."""
    parts = layer._parts_of(stage.weight)
    rows, columns = parts[0].shape[-2:]
    if isinstance(layer, StackedExpertsLayer) and layer.stack_of(layer).transposed:
        return columns, rows
    if not isinstance(layer, GroupedLinearLayer):
        rows = sum(part.shape[-2] for part in parts)
    split = None if is_distributed(parts[0]) else split_of(layer, stage)
    times = 1 if split is None else split.size
    return (rows * times, columns) if split is None or split.dim == 0 else (rows, columns * times)


def packed(
    layer: Any,
    stage: Stage,
    group: int,
    operand: Operand,
    written_as: WeightFormat,
    dtypes: dict[int, torch.dtype],
    together: Together,
) -> list[Packed]:
    """Return a matrix as it is served: its pieces from top to bottom.

    Args:
        group: which matrix of the stage.
        together: the processes that go on only together.
        dtypes: that FSDP2 casts parameters to before they are multiplied, by the id of this rank's shard.
    Raises:
        ValueError: ranks have scales that the format cannot join.
    """
    with together.step():
        pieces = _pieces(layer, stage, group, dtypes)
    quantized = quantize_pieces(pieces, operand, written_as, _stored, together)
    whole = [gather_piece(piece, own, written_as) for piece, own in zip(pieces, quantized)]
    split, shape = split_of(layer, stage), shape_of(layer, stage)
    if split is None:
        return whole
    name = f"{layer.name}.{stage.weight}".lstrip(".")
    return [gather_split(own, split, written_as, shape, name) for own in whole]


def _pieces(layer: Any, stage: Stage, group: int, dtypes: dict[int, torch.dtype]) -> list[Piece]:
    parts = layer._parts_of(stage.weight)
    if isinstance(layer, (StackedExpertsLayer, GroupedLinearLayer)):
        transposed = isinstance(layer, StackedExpertsLayer) and layer.stack_of(layer).transposed
        part = parts[group] if len(parts) > 1 else parts[0]
        if part.dim() < 3:
            return [Piece.of(part, 0, dtypes)]
        return [Piece.of_member(part, group, transposed, dtypes)]
    first, pieces = 0, []
    for part in parts:
        pieces.append(Piece.of(part, first, dtypes, layer._placed))
        first += pieces[-1].rows
    if len(pieces) > 1 and all(piece.group is None for piece in pieces):
        return [Piece.of(layer._whole(stage.weight).detach(), 0, dtypes)]
    return pieces


def _stored(weight: Any, operand: Operand) -> list[Tensor] | None:
    """Return the buffers of a weight that is stored as the operand is quantized; None of any other."""
    if isinstance(weight, QuantizedTensor):
        stored = buffers_of(weight)
        same = stored.quantizer._format_layout() is operand.quantizer._format_layout()
        return stored.rowwise if same else None
    return None if isinstance(weight, Tensor) else buffers_of(weight).rowwise


def input_scales(layer: Any, stage: Stage) -> Tensor:
    """Return the scales of delayed scaling that the inputs of this rank's groups are multiplied by, fp32; 0 is none."""
    scales = getattr(layer, f"{stage.prefix}scale_fwd")
    if scales is None:
        return torch.zeros(layer._groups, dtype=torch.float32, device=layer._parts_of(stage.weight)[0].device)
    return scales[: layer._groups]


def input_scale(layer: Any, stage: Stage, group: int, all_groups: Tensor) -> Tensor:
    """Return the scale that decodes the inputs of a group under delayed scaling, fp32 (1,).

    That of a group without inputs yet is the smallest of all groups.

    Args:
        all_groups: :func:`input_scales` of all ranks' groups.
    Raises:
        ValueError: no group has seen an input.
    """
    seen, scale = all_groups[all_groups > 0.0], input_scales(layer, stage)[group]
    if not len(seen):
        raise ValueError(
            f"{layer.name or stage.weight} has seen no input under delayed scaling yet, whose scale would be exported; "
            "run a training step or narrowcast.calibrate_delayed_scaling(model, step) first"
        )
    return reciprocal((scale if scale > 0.0 else seen.min()).reshape(1))
