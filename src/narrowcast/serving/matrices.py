"""Quantized matrices of layers, as their forward's GEMM reads them, in the form of a checkpoint.

A matrix is in one piece, or in several: one for each parameter that its rows are parts of. FSDP2 shards a piece by
rows, tensor parallelism splits the matrix of a layer by rows or columns, and ``shards.py`` joins what ranks quantized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import shown
from ..convert.experts import StackedExpertsLayer, is_transposed
from ..distributed.together import Together
from ..layers import GroupedLinearLayer, Stage
from ..layers.described import ParameterRecord
from ..layers.tensor_parallel import Split
from ..quantizers import Operand
from ..reference.scaling import reciprocal
from .formats import Packed, WeightFormat
from .shards import Piece, gather_piece, gather_split, quantize_pieces


class Rows(NamedTuple):
    """Rows of a quantized matrix that are served as one weight: the first, how many, and the weight's name."""

    first: int
    count: int
    name: str


class Matrix(NamedTuple):
    """A matrix that a layer quantizes by itself, ``group`` of its stage, and the weights that its rows are.

    ``parts``: the parameters of the weight. ``apart``: how ranks split it that each multiply by their part alone.
    """

    layer: Any
    stage: Stage
    group: int
    parts: list[ParameterRecord]
    apart: Split | None
    operand: Operand
    format: WeightFormat
    rows: list[Rows]

    @property
    def dim(self) -> int:
        """The dim of the matrix that ``apart`` splits; negative where ranks have whole matrices."""
        return -1 if self.apart is None else self.apart.dim + 2 - len(self.parts[0].shape)  # type: ignore[operator]

    @property
    def owners(self) -> Split | None:
        """How ranks share the matrices of a stage, each with some of them."""
        return self.apart if self.dim < 0 else None


def shape_of(layer: Any, parts: list[ParameterRecord]) -> tuple[int, int]:
    """Return (N, K) of each matrix of a weight, over all ranks."""
    rows, columns = parts[0].shape[-2:]
    if is_transposed(layer):
        return columns, rows
    return (rows if isinstance(layer, GroupedLinearLayer) else sum(part.shape[-2] for part in parts)), columns


def packed(matrix: Matrix, dtypes: dict[int, torch.dtype], together: Together) -> list[Packed]:
    """Return a matrix as it is served: its pieces from top to bottom.

    Args:
        together: the processes that go on only together.
        dtypes: that FSDP2 casts parameters to before they are multiplied, by the id of this rank's shard.
    Raises:
        ValueError: ranks have scales that the format cannot join.
    """
    with together.step():
        pieces = _pieces(matrix, dtypes)
    quantized = quantize_pieces(pieces, matrix.operand, matrix.format, together)
    whole = [gather_piece(piece, own, matrix.format) for piece, own in zip(pieces, quantized)]
    if matrix.apart is None or matrix.dim < 0:
        return whole
    shape, name = shape_of(matrix.layer, matrix.parts), matrix.parts[0].name
    return [gather_split(own, matrix.apart, matrix.dim, matrix.format, shape, name) for own in whole]


def _pieces(matrix: Matrix, dtypes: dict[int, torch.dtype]) -> list[Piece]:
    layer, parts, apart = matrix.layer, matrix.parts, matrix.apart
    if isinstance(layer, (StackedExpertsLayer, GroupedLinearLayer)):
        part = parts[matrix.group] if len(parts) > 1 else parts[0]
        if len(part.shape) < 3:
            return [Piece.of(part, apart, 0, dtypes)]
        return [Piece.of_member(part, apart, matrix.group, is_transposed(layer), dtypes)]
    first, pieces = 0, []
    for part in parts:
        pieces.append(Piece.of(part, apart, first, dtypes))
        first += pieces[-1].rows
    if len(pieces) > 1 and all(piece.over is None for piece in pieces):
        return [Piece(layer._whole(matrix.stage.weight).detach(), 0, first)]
    return pieces


def input_scales(layer: Any, stage: Stage) -> Tensor:
    """Return the scales of delayed scaling that the inputs of this rank's groups are multiplied by, fp32; 0 is none."""
    scales = getattr(layer, f"{stage.prefix}scale")
    if scales is None:
        return torch.zeros(layer._groups, dtype=torch.float32, device=layer._parts_of(stage.weight)[0].device)
    return scales[: layer._groups]


def input_scale(matrix: Matrix, all_groups: Tensor) -> Tensor:
    """Return the scale that decodes the inputs of a matrix under delayed scaling, fp32 (1,).

    That of a group without inputs yet is the smallest of all groups.

    Args:
        all_groups: :func:`input_scales` of all ranks' groups.
    Raises:
        ValueError: no group has seen an input.
    """
    layer, stage = matrix.layer, matrix.stage
    seen, scale = all_groups[all_groups > 0.0], input_scales(layer, stage)[matrix.group]
    if not len(seen):
        raise ValueError(
            f"the layer of {shown(matrix.parts[0].name)} has seen no input under delayed scaling yet, whose scale "
            "would be exported; run a training step first, or a forward and narrowcast.renew_delayed_scaling(model)"
        )
    return reciprocal((scale if scale > 0.0 else seen.min()).reshape(1))
