"""The split of a linear layer over processes: collectives of its operands and results.

mode      weight of this process    input                                     output
column    (N / p, K)                whole; with sequence_parallel its rows    its columns
row       (N, K / p)                its columns                               whole; with sequence_parallel its rows

Rows are gathered as the bytes they are quantized to, where those of the shares make up those of the whole, and in high
precision where they do not. Per-tensor scales are agreed on first: the amax of the shares is reduced, or the scale of
delayed scaling, whose smallest is that of the largest amax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, shown
from .._tracing import has_addresses, once_differentiable
from ..functional import amax_to_share, quantize, transpose_codes
from ..functional.collectives import (
    arrived,
    check_scatters,
    gather_rows,
    group_name,
    group_size,
    largest_of,
    parts_of_sum,
    registered_name,
    scatter_rows,
    smallest_of,
    start_gather,
    start_scatter,
    start_sum,
    sum_over,
)
from ..quantizers import Operand, OperandBuffers
from ..reference import batch_invariant

MODES = (None, "column", "row")


@dataclass(frozen=True)
class TensorParallel:
    """``mode``: None, "column" or "row". ``group``: name of the process group, None for the default one.

    ``sequence_parallel``: outside the layer, every process holds a share of the rows.
    """

    mode: str | None = None
    group: str | None = None
    sequence_parallel: bool = False

    def depends(self) -> tuple[Any, ...]:
        """Return the values that determine what a stage sends: a name may come to stand for another group."""
        return self.mode, self.sequence_parallel, registered_name(self.group), group_size(self.group)

    @property
    def gathers_input(self) -> bool:
        """Whether the input comes in shares of rows."""
        return self.mode == "column" and self.sequence_parallel

    @property
    def gathers_grad_output(self) -> bool:
        """Whether the gradient of the output comes in shares of rows."""
        return self.mode == "row" and self.sequence_parallel

    @property
    def processes_of_sum(self) -> int:
        """How many processes add their parts of an output."""
        return group_size(self.group) if self.mode == "row" else 1

    def dtype_of_part(self, dtype: torch.dtype, batch_invariant: int) -> torch.dtype:
        """Return the dtype in which each process computes its part of an output that becomes ``dtype``."""
        return torch.float32 if batch_invariant and self.mode == "row" else dtype

    def reduced_output(self, out: Tensor, dtype: torch.dtype, batch_invariant: int) -> Tensor:
        """Return the output from what every process computed of it."""
        if self.mode != "row":
            return out
        if batch_invariant:
            return self._summed_in_order(out).to(dtype)
        return scatter_rows(out, self.group) if self.sequence_parallel else sum_over(out, self.group)

    def _summed_in_order(self, part: Tensor) -> Tensor:
        """Return the sum of every process's fp32 part in the order in which one process adds its halves."""
        return batch_invariant.sum_of_halves(parts_of_sum(part, self.group, self.sequence_parallel))

    def check_batch_invariant(self, weight: Operand | None, in_features: int, most: int) -> None:
        """Check that the processes compute the bits of one that computes alone.

        Args:
            weight: how the weight is quantized; None in high precision.
            in_features: of this process.
            most: of how many processes the mode is.

        Raises:
            ValueError: the parts of a sum are not those of one process, or the shard of a weight has a scale of its
                own.
        """
        size = group_size(self.group)
        if self.mode == "row" and (
            size not in (2, 4, 8) or size > most or in_features % batch_invariant.BLOCK
        ):
            raise ValueError(
                f"a row-parallel layer with {in_features} in_features on each of {size} processes adds its sums in "
                "another order than one process; in the batch-invariant mode use 2, 4 or 8 processes, at most "
                f"set_deterministic(processes={most}), and a multiple of {batch_invariant.BLOCK} in_features on each"
            )
        if weight is not None and (weight.shared or weight.joins == ("", "")):
            raise ValueError(
                "each process scales its shard of the weight by the amax of that shard, which one process does not; "
                "in the batch-invariant mode use Float8BlockScaling or MXFP8BlockScaling"
            )

    def start_grad_input(self, grad: Tensor) -> Tensor:
        """Begin to sum the gradient of the input over processes; :func:`..functional.collectives.arrived` ends it."""
        return start_scatter(grad, self.group) if self.sequence_parallel else start_sum(grad, self.group)

    # -- rows that are gathered as bytes -----------------------------------------------------------------------------

    def joins(self, operand: Operand, rows: int) -> bool:
        """Return whether shares of so many rows, quantized, make up the whole."""
        return operand.joins != ("", "") and rows % operand.joined_rows == 0

    def share(
        self, x: Tensor, operand: Operand, seed: Tensor | None, scale: Tensor | None, amax: Tensor | None
    ) -> OperandBuffers:
        """Return this process's rows (M, K), quantized with the scale of all processes' rows; the others' arguments
        too.
        """
        if operand.shared is not None:
            largest = largest_of(amax_to_share(x, operand.quantizer, seed), self.group)
            return operand.split(quantize(x, operand.shared, None, largest, seed))
        return operand.split(quantize(x, operand.quantizer, seed, self.shared_scale(operand, scale), amax))

    def shared_scale(self, operand: Operand, scale: Tensor | None) -> Tensor | None:
        """Return the delayed scale for a shard: the scale of the largest amax of all processes."""
        if operand.unseen is None or scale is None:
            return scale
        return smallest_of(torch.where(scale == 0.0, operand.unseen, scale), self.group)

    def start_joining(self, buffers: list[Tensor], joins: str) -> list[Tensor]:
        """Begin to gather the buffers of one direction of a share."""
        return [
            buffer if join == "s" else start_gather(buffer, self.group)
            for buffer, join in zip(buffers, joins)
        ]

    def joined(self, begun: list[Tensor], joins: str) -> list[Tensor]:
        """Return the buffers of the whole from what :meth:`start_joining` began."""
        size = group_size(self.group)
        return [
            buffer if join == "s" else arrived(buffer) if join == "r" else _beside(arrived(buffer), size)
            for buffer, join in zip(begun, joins)
        ]

    def whole_operand(self, share: OperandBuffers, operand: Operand) -> OperandBuffers:
        """Return both directions of the whole, each where the share has it."""
        if share.rowwise and share.columnwise and operand.rowwise[-1] and operand.columnwise[-1]:
            # one scale for both, so the codes of one direction are those of the other: they are sent once
            rowwise = self.joined(self.start_joining(share.rowwise, operand.joins[0]), operand.joins[0])
            return OperandBuffers(rowwise, [transpose_codes(rowwise[0]), rowwise[1]], share.quantizer)
        rowwise, columnwise = (
            self.start_joining(side, joins)
            for side, joins in zip((share.rowwise, share.columnwise), operand.joins)
        )
        return OperandBuffers(
            self.joined(rowwise, operand.joins[0]), self.joined(columnwise, operand.joins[1]), share.quantizer
        )

    # -- shapes ------------------------------------------------------------------------------------------------------

    def output_shape(self, input_shape: tuple[int, ...], features: int, size: int) -> tuple[int, ...]:
        """Return the shape of this process's output for ``features`` columns in its weight's rows, among ``size``
        processes.

        Raises:
            ValueError: the rows do not divide among the processes that share them.
        """
        return self._result_shape(input_shape, features, size, self.gathers_input, self.mode == "row")

    def grad_input_shape(
        self, grad_output_shape: tuple[int, ...], features: int, size: int
    ) -> tuple[int, ...]:
        """Return the shape of the gradient of this process's input, as :meth:`output_shape`."""
        scattered = self.mode == "column"
        return self._result_shape(grad_output_shape, features, size, self.gathers_grad_output, scattered)

    def _result_shape(
        self, shape: tuple[int, ...], features: int, size: int, gathered: bool, scattered: bool
    ) -> tuple[int, ...]:
        if gathered:
            return (shape[0] * size, *shape[1:-1], features)
        if scattered and self.sequence_parallel:
            check_scatters(shape, size)
            return (shape[0] // size, *shape[1:-1], features)
        return (*shape[:-1], features)


def _beside(gathered: Tensor, size: int) -> Tensor:
    """Return matrices that are stacked along the rows, joined along the columns."""
    wide = gathered.shape[-1] % 8 == 0 and gathered.dtype == torch.uint8 and has_addresses()
    words = gathered.view(torch.int64) if wide else gathered
    matrices = words.unflatten(0, (size, words.shape[0] // size))
    return matrices.transpose(0, 1).flatten(1).contiguous().view(gathered.dtype)


def tensor_parallel(mode: str | None, process_group: Any, sequence_parallel: bool) -> TensorParallel:
    """Return checked; without anything to split if the group has one process.

    Raises:
        ValueError: another mode, or ``sequence_parallel`` without one.
    """
    if not is_one_of(mode, MODES):
        raise ValueError(f"tensor_parallel_mode is {shown(mode)}; use None, 'column' or 'row'")
    if sequence_parallel and mode is None:
        raise ValueError("sequence_parallel=True needs tensor_parallel_mode='column' or 'row'")
    group = group_name(process_group, "tensor_parallel_group")
    if mode is None or group_size(group) == 1:
        return TensorParallel()
    return TensorParallel(mode, group, bool(sequence_parallel))


def local_features(parallel: TensorParallel, in_features: int, out_features: int) -> tuple[int, int]:
    """Return (in_features, out_features) of this process's weight.

    Raises:
        ValueError: the split one does not divide among the processes.
    """
    if parallel.mode is None:
        return in_features, out_features
    size = group_size(parallel.group)
    split = out_features if parallel.mode == "column" else in_features
    if split % size:
        label = "out_features" if parallel.mode == "column" else "in_features"
        raise ValueError(
            f"{label}={split} does not divide among {size} processes with tensor_parallel_mode={shown(parallel.mode)}"
        )
    if parallel.mode == "column":
        return in_features, out_features // size
    return in_features // size, out_features


class GatherRows(torch.autograd.Function):
    """The rows of all processes of a group; every process gets its rows of the summed gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str | None) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return scatter_rows(grad_output, ctx.group), None


def gathered(x: Tensor, parallel: TensorParallel) -> Tensor:
    """Return ``x`` with the rows of all processes, differentiable."""
    return GatherRows.apply(x, parallel.group)
