"""FP8 with fp32 scales per 1x128 block or 128x128 tile; column-wise data is transposed."""

from __future__ import annotations

from ..functional import transpose_codes
from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """Data uint8 (*lead, K) and (K, *lead); scales fp32, for 1x128 blocks stored scale-row first."""

    _FLATTEN_TENSOR_BUFFERS = (
        ("_rowwise_data", "rowwise_data"),
        ("_rowwise_scale_inv", "rowwise_scale_inv"),
        ("_columnwise_data", "columnwise_data"),
        ("_columnwise_scale_inv", "columnwise_scale_inv"),
    )
    _ROWWISE_BUFFERS = ("_rowwise_data", "_rowwise_scale_inv")
    _COLUMNWISE_BUFFERS = ("_columnwise_data", "_columnwise_scale_inv")

    @property
    def _is_2D_scaled(self) -> bool:
        return self._quantizer.block_scaling_dim == 2  # type: ignore[attr-defined]

    def _create_columnwise(self) -> None:
        if not self._is_2D_scaled:
            super()._create_columnwise()
        # a 128x128 tile keeps its scale when transposed: only the padding of the scale rows moves
        described = self._quantizer.with_usage(columnwise=True)._describe_buffers(tuple(self.size()))  # type: ignore[attr-defined]
        data, scale = self._rowwise_data, self._rowwise_scale_inv  # type: ignore[attr-defined]
        self._columnwise_data = transpose_codes(data)
        columnwise_scale = scale.new_zeros(described["_columnwise_scale_inv"][0])
        rows_of_tiles, columns_of_tiles = scale.shape[0], columnwise_scale.shape[0]
        columnwise_scale[:, :rows_of_tiles] = scale[:, :columns_of_tiles].t()
        self._columnwise_scale_inv = columnwise_scale


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8BlockwiseQTensorStorage`."""
