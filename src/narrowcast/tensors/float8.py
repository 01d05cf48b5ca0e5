"""Per-tensor FP8: one decoding scale for the whole tensor, the transpose stored beside the data."""

from __future__ import annotations

from ..formats import DType
from ..functional import transpose_codes
from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class Float8TensorStorage(QuantizedTensorStorage):
    """Buffers: ``_data`` uint8 (*lead, K); ``_transpose`` uint8 (K, *lead); ``_scale_inv`` fp32 (1,)."""

    _FLATTEN_TENSOR_BUFFERS = (
        ("_data", "data"),
        ("_transpose", "data_transpose"),
        ("_scale_inv", "fp8_scale_inv"),
    )
    _ROWWISE_BUFFERS = ("_data", "_scale_inv")
    _COLUMNWISE_BUFFERS = ("_transpose", "_scale_inv")

    @property
    def _fp8_dtype(self) -> DType:
        return self._quantizer.dtype  # type: ignore[attr-defined]

    @property
    def _transpose_invalid(self) -> bool:
        return self._transpose is None  # type: ignore[attr-defined]

    def _create_columnwise(self) -> None:
        self._transpose = transpose_codes(self._data)  # type: ignore[attr-defined]


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8TensorStorage`."""
