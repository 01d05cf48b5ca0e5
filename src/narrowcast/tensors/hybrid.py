"""A tensor whose row-wise and column-wise data are in different formats."""

from __future__ import annotations

from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Three buffers per direction, in the order of that direction's own format; those it lacks hold no elements."""

    _FLATTEN_TENSOR_BUFFERS = tuple(
        (f"_{direction}_{index}", f"{direction}_{index}")
        for direction in ("rowwise", "columnwise")
        for index in range(3)
    )
    _ROWWISE_BUFFERS = ("_rowwise_0", "_rowwise_1", "_rowwise_2")
    _COLUMNWISE_BUFFERS = ("_columnwise_0", "_columnwise_1", "_columnwise_2")

    def _shape_from_buffers(self) -> tuple[int, ...]:
        raise RuntimeError("the buffers of a hybrid tensor do not say its shape; give shape=")


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """Tensor over :class:`HybridQuantizedTensorStorage`."""
