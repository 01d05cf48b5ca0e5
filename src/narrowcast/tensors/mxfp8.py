"""MXFP8: FP8 data with one E8M0 scale per 32 elements of a row, or of a column."""

from __future__ import annotations

from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class MXFP8TensorStorage(QuantizedTensorStorage):
    """Data uint8 in logical shape for both directions (not transposed); scales E8M0 bytes, padded to 128 x 4."""

    _FLATTEN_TENSOR_BUFFERS = (
        ("_rowwise_data", "rowwise_data"),
        ("_rowwise_scale_inv", "rowwise_scale_inv"),
        ("_columnwise_data", "columnwise_data"),
        ("_columnwise_scale_inv", "columnwise_scale_inv"),
    )
    _ROWWISE_BUFFERS = ("_rowwise_data", "_rowwise_scale_inv")
    _COLUMNWISE_BUFFERS = ("_columnwise_data", "_columnwise_scale_inv")

    def _shape_from_buffers(self) -> tuple[int, ...]:
        rowwise = self._rowwise_data  # type: ignore[attr-defined]
        return tuple((self._columnwise_data if rowwise is None else rowwise).shape)  # type: ignore[attr-defined]


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP8TensorStorage`."""
