"""NVFP4: packed E2M1 data, one E4M3 scale per 16 elements, one fp32 amax per tensor (or row)."""

from __future__ import annotations

from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class NVFP4TensorStorage(QuantizedTensorStorage):
    """Data packed two per byte, (*lead, K/2) and transposed (K, M/2), zero-padded to whole blocks of 16."""

    _FLATTEN_TENSOR_BUFFERS = (
        ("_rowwise_data", "rowwise_data"),
        ("_rowwise_scale_inv", "rowwise_scale_inv"),
        ("_columnwise_data", "columnwise_data"),
        ("_columnwise_scale_inv", "columnwise_scale_inv"),
        ("_amax_rowwise", "amax_rowwise"),
        ("_amax_columnwise", "amax_columnwise"),
    )
    _ROWWISE_BUFFERS = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
    _COLUMNWISE_BUFFERS = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")

    def _shape_from_buffers(self) -> tuple[int, ...]:
        rowwise = self._rowwise_data  # type: ignore[attr-defined]
        if rowwise is not None:
            return (*rowwise.shape[:-1], 2 * rowwise.shape[-1])
        transposed = self._columnwise_data  # type: ignore[attr-defined]
        return (2 * transposed.shape[-1], transposed.shape[0])


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`NVFP4TensorStorage`."""
