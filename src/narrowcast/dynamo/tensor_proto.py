"""``TensorProto``: a tensor's description without its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._device import default_device
from ..quantizers import Quantizer
from ..tensors import QuantizedTensor, QuantizedTensorStorage, TensorOrQuantized


@dataclass(unsafe_hash=True)
class TensorProto:
    """Shape, dtype and quantizer of a plain or quantized tensor; safe to build and use inside traced code.

    Equal descriptions have equal hashes; :meth:`update_usage` changes both.

    Args:
        shape: logical shape.
        dtype: dtype, or nominal dtype of a quantized tensor.
        quantizer: None for a plain tensor.
        requires_grad: as for a tensor.
        device: None for the default accelerator, or the CPU without one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        self.quantizer = None if self.quantizer is None else self.quantizer.copy()
        self.device = None if self.device is None else torch.device(self.device)

    @property
    def is_quantized(self) -> bool:
        """Whether this describes a quantized tensor."""
        return self.quantizer is not None

    def inner_names(self) -> tuple[str, ...]:
        """Return names of the buffers, in flatten order; ``("data",)`` for a plain tensor.

        Raises:
            RuntimeError: the quantizer describes a buffer its storage does not declare, or in another order.
            ValueError: a shape or directions that quantizing refuses, too.
        """
        if self.quantizer is None:
            return ("data",)
        return tuple(self.quantizer._buffer_table(self.shape, self.dtype))

    def create_metadata(self) -> dict[str, Any]:
        """Return the context for ``__tensor_unflatten__``; for a plain tensor, a note of dtype and grad flag."""
        if self.quantizer is None:
            return {"is_quantized": False, "dtype": self.dtype, "requires_grad": self.requires_grad}
        return self.quantizer.create_metadata(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)

    def create_inner_tensors(self) -> list[Tensor]:
        """Return uninitialized buffers in the order of :meth:`inner_names`; fake under a fake mode."""
        device = default_device() if self.device is None else self.device
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=device)]
        described = self.quantizer._buffer_table(self.shape, self.dtype)
        return [torch.empty(size, dtype=dtype, device=device) for size, dtype in described.values()]

    def create_tensor(self) -> TensorOrQuantized:
        """Return an uninitialized tensor of the described kind; traces without a graph break."""
        return self.assemble(self.create_inner_tensors())

    def assemble(self, inner_tensors: list[Tensor]) -> Any:
        """Return the tensor around given buffers, in the order of :meth:`inner_names`.

        Raises:
            ValueError: another number of buffers.
        """
        names = self.inner_names()
        if len(inner_tensors) != len(names):
            raise ValueError(f"expected {len(names)} buffers {names}, got {len(inner_tensors)}")
        if self.quantizer is None:
            tensor = inner_tensors[0]
            return tensor.requires_grad_(True) if self.requires_grad else tensor
        buffers = dict(zip(names, inner_tensors))
        storage_class = self.quantizer._resolve_storage_cls()
        return storage_class.__tensor_unflatten__(buffers, self.create_metadata(), self.shape, None)

    def update_usage(
        self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Switch directions on or off, as the method of the tensor does.

        Raises:
            ValueError: a plain tensor has no directions.
        """
        if self.quantizer is None:
            raise ValueError("a plain tensor has no row-wise or column-wise data")
        self.quantizer = self.quantizer.with_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)


def to_tensor_proto(tensor: TensorOrQuantized) -> TensorProto:
    """Return the description of a plain tensor, a quantized tensor or a bare storage; it traces."""
    if isinstance(tensor, QuantizedTensorStorage):
        wrapper = isinstance(tensor, QuantizedTensor)
        quantizer, dtype = tensor._description
        described = quantizer.replace(internal=not wrapper)
        return TensorProto(
            tuple(tensor.size()), dtype, described, wrapper and tensor.requires_grad, tensor.device
        )
    return TensorProto(tuple(tensor.shape), tensor.dtype, None, tensor.requires_grad, tensor.device)
