"""How a linear layer is split over processes, and what its operands and results go through because of it.

mode      weight of this process    input                                     output
column    (N / p, K)                whole; with sequence_parallel its rows    its columns
row       (N, K / p)                its columns                               whole; with sequence_parallel its rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .collectives import check_scatters, gather_rows, group_name, group_size, scatter_rows, sum_over

MODES = (None, "column", "row")


@dataclass(frozen=True)
class TensorParallel:
    """``mode``: None, "column" or "row". ``group``: name of the process group, None for the default one.

    ``sequence_parallel``: outside of the layer, every process holds a share of the rows.
    """

    mode: str | None = None
    group: str | None = None
    sequence_parallel: bool = False

    @property
    def gathers_input(self) -> bool:
        """Whether the input comes in shares of rows."""
        return self.mode == "column" and self.sequence_parallel

    @property
    def gathers_grad_output(self) -> bool:
        """Whether the gradient of the output comes in shares of rows."""
        return self.mode == "row" and self.sequence_parallel

    def whole_input(self, inp: Tensor) -> Tensor:
        """The input with the rows of all processes."""
        return gather_rows(inp, self.group) if self.gathers_input else inp

    def whole_grad_output(self, grad: Tensor) -> Tensor:
        """The gradient of the output with the rows of all processes."""
        return gather_rows(grad, self.group) if self.gathers_grad_output else grad

    def reduced_output(self, out: Tensor) -> Tensor:
        """The output from what every process computed of it."""
        return self._reduced(out) if self.mode == "row" else out

    def reduced_grad_input(self, grad: Tensor) -> Tensor:
        """The gradient of the input from what every process computed of it."""
        return self._reduced(grad) if self.mode == "column" else grad

    def output_shape(self, input_shape: tuple[int, ...], features: int, size: int) -> tuple[int, ...]:
        """Shape of this process's output for ``features`` columns in its weight's rows, among ``size`` processes.

        Raises:
            ValueError: the rows do not divide among the processes that share them.
        """
        return self._result_shape(input_shape, features, size, self.gathers_input, self.mode == "row")

    def grad_input_shape(
        self, grad_output_shape: tuple[int, ...], features: int, size: int
    ) -> tuple[int, ...]:
        """Shape of the gradient of this process's input, as :meth:`output_shape`."""
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

    def _reduced(self, tensor: Tensor) -> Tensor:
        return scatter_rows(tensor, self.group) if self.sequence_parallel else sum_over(tensor, self.group)


def tensor_parallel(mode: str | None, process_group: Any, sequence_parallel: bool) -> TensorParallel:
    """Checked; without anything to split where the group has one process.

    Raises:
        ValueError: another mode, or ``sequence_parallel`` without one.
    """
    if mode not in MODES:
        raise ValueError(f"tensor_parallel_mode is {mode!r}; use None, 'column' or 'row'")
    if sequence_parallel and mode is None:
        raise ValueError("sequence_parallel=True needs tensor_parallel_mode='column' or 'row'")
    group = group_name(process_group)
    if mode is None or group_size(group) == 1:
        return TensorParallel()
    return TensorParallel(mode, group, bool(sequence_parallel))


def local_features(parallel: TensorParallel, in_features: int, out_features: int) -> tuple[int, int]:
    """(in_features, out_features) of this process's weight.

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
            f"{label}={split} does not divide among {size} processes with tensor_parallel_mode={parallel.mode!r}"
        )
    if parallel.mode == "column":
        return in_features, out_features // size
    return in_features // size, out_features
