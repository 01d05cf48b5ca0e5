"""A tensor kept in high precision, behind the interface of the quantized ones."""

from __future__ import annotations

from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class IdentityTensorStorage(QuantizedTensorStorage):
    """One buffer ``_hp_data`` in logical shape serves both directions."""

    _FLATTEN_TENSOR_BUFFERS = (("_hp_data", "hp_data"),)
    _ROWWISE_BUFFERS = ("_hp_data",)
    _COLUMNWISE_BUFFERS = ("_hp_data",)

    def _shape_from_buffers(self) -> tuple[int, ...]:
        return tuple(self._hp_data.shape)  # type: ignore[attr-defined]


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """Tensor over :class:`IdentityTensorStorage`."""
