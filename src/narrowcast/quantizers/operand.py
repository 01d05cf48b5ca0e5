"""``Operand``: how one operand of a GEMM is quantized, in plain facts that traced code may read.

Inside a traced graph a quantizer is only ever passed to an operator; reading it there is slow to guard, and on some
PyTorch versions an error. An operand stands beside it and says what the code around the operators must know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import shown
from .._tracing import record, slice_of
from ..functional import draw_seed, quantize
from ..tensors import QuantizedTensor, QuantizedTensorStorage, storage_of
from ..tensors.storage import resolve_storage_class
from .quantizer import Quantizer


class OperandBuffers(NamedTuple):
    """A quantized operand: the buffers of each direction, an empty list if it is absent, and the quantizer of both."""

    rowwise: list[Tensor]
    columnwise: list[Tensor]
    quantizer: Quantizer


@dataclass(frozen=True)
class Operand:
    """A quantizer in the directions that will be read, with the facts that the code around operators needs.

    ``value``: the quantizer's value as text. ``storage_name``: identifier of its storage class. ``rowwise``,
    ``columnwise``: which of its buffers make up that direction, all False for a direction that it does not produce.
    ``stochastic``: it needs a fresh seed. ``unseen``: what it takes instead of a scale of 0 from state; None if it
    needs no state. ``current``: a pass over the tensor finds its scale. ``shared``: the quantizer for rows that are
    split over processes, which reduce their amax; None if they need not. ``joins``: how the buffers of such rows make
    up those of the whole, row-wise and column-wise, "" where they do not; ``joined_rows``: only parts of a multiple
    of so many rows do (see :class:`..formats.Layout`).
    """

    quantizer: Quantizer
    value: str
    storage_name: str
    rowwise: tuple[bool, ...]
    columnwise: tuple[bool, ...]
    stochastic: bool
    unseen: float | None
    current: bool
    shared: Quantizer | None = None
    joins: tuple[str, str] = ("", "")
    joined_rows: int = 1
    _places: tuple[slice, slice] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = [
            slice_of([place for place, one in enumerate(which) if one])
            for which in (self.rowwise, self.columnwise)
        ]
        object.__setattr__(self, "_places", None if None in places else tuple(places))

    @staticmethod
    def of(quantizer: Quantizer, rowwise: bool = True, columnwise: bool = True) -> Operand:
        """Return the operand of a quantizer in these directions, whatever its present ones.

        Raises:
            ValueError: it reduces amax over a process group, which no layer could give it.
        """
        if quantizer.with_amax_reduction:
            raise ValueError(
                f"{shown(quantizer)} in a recipe: layers quantize what each rank has and have no process group to "
                "give; use with_amax_reduction=False"
            )
        quantizer._seal()
        quantizer = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        storage = resolve_storage_class(quantizer._storage_name)
        names = storage.buffer_attributes(rowwise, columnwise)
        shares, joins, joined_rows = quantizer._joins()
        shared = quantizer.replace(with_amax_reduction=True) if shares else None
        if shared is not None:
            shared._seal()
        return Operand(
            quantizer,
            quantizer._value_text(),
            quantizer._storage_name,
            tuple(rowwise and name in storage._ROWWISE_BUFFERS for name in names),
            tuple(columnwise and name in storage._COLUMNWISE_BUFFERS for name in names),
            quantizer._is_stochastic(),
            quantizer.unseen if quantizer._is_delayed() else None,  # type: ignore[attr-defined]
            quantizer._is_current(),
            shared,
            joins,
            joined_rows,
        )

    def split(self, buffers: list[Tensor]) -> OperandBuffers:
        """Return the result of a quantizing operator, by direction."""
        if self._places is None:
            rowwise, columnwise = compress(buffers, self.rowwise), compress(buffers, self.columnwise)
            return record(OperandBuffers, (list(rowwise), list(columnwise), self.quantizer))
        rows, columns = self._places
        return record(OperandBuffers, (buffers[rows], buffers[columns], self.quantizer))

    def quantize(self, x: Tensor, scale: Tensor | None = None, amax: Tensor | None = None) -> OperandBuffers:
        """Quantize ``x`` (*lead, K), fp32, bf16 or fp16, in traced or eager code, without gradient.

        Args:
            scale, amax: state of delayed scaling, fp32 (n,). A None ``amax`` collects nothing. Current scaling takes
                ``amax`` without ``scale``, from an earlier pass over ``x``; the others use neither.
        """
        return self.split(quantize(x, self.quantizer, self.seed(x), scale, amax))

    def seed(self, like: Tensor) -> Tensor | None:
        """Return a fresh seed where rounding is stochastic."""
        return draw_seed(like) if self.stochastic else None

    def assemble(self, buffers: list[Tensor], dtype: torch.dtype) -> QuantizedTensorStorage:
        """Return the storage around what a quantizing operator returned."""
        # by name: the compiler can make instances of a class it finds in a global, not of one it read off a quantizer
        storage = resolve_storage_class(self.storage_name)
        return storage.from_buffers(buffers, any(self.rowwise), any(self.columnwise), self.quantizer, dtype)


def buffers_of(storage: QuantizedTensorStorage) -> OperandBuffers:
    """Return a quantized tensor as an operand; its buffers are shared."""
    if isinstance(storage, QuantizedTensor):
        storage = storage_of(storage)
    usages = storage.get_usages()
    return OperandBuffers(
        storage.rowwise_operand() if usages["rowwise"] else [],
        storage.columnwise_operand() if usages["columnwise"] else [],
        storage._quantizer,  # type: ignore[arg-type]
    )
