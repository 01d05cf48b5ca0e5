"""NVFP4: packed E2M1 data, one E4M3 scale per 16 elements, one fp32 amax per tensor (or row)."""

from __future__ import annotations

import math

from ..formats import NVFP4_BLOCK, cdiv
from ..reference import codecs
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

    def _create_columnwise(self) -> None:
        if not self._quantizer.with_2d_quantization:  # type: ignore[attr-defined]
            super()._create_columnwise()
        described = self._quantizer.with_usage(columnwise=True)._describe_buffers(tuple(self.size()))  # type: ignore[attr-defined]
        data, scale, amax = self.rowwise_operand()
        codes = codecs.unpack_float4(data)
        columns, packed_rows = described["_columnwise_data"][0]
        rows = math.prod(codes.shape[:-1])
        transposed = codes.new_zeros((columns, 2 * packed_rows))
        transposed[:, :rows] = codes.view(rows, codes.shape[-1])[:, :columns].t()
        self._columnwise_data = codecs.pack_float4(transposed)
        # a 16x16 tile keeps its scale when transposed; it is repeated on each of its rows
        tiles = scale[:rows:NVFP4_BLOCK, : cdiv(columns, NVFP4_BLOCK)]
        columnwise_scale = scale.new_zeros(described["_columnwise_scale_inv"][0])
        columnwise_scale[:columns, : tiles.shape[0]] = tiles.t().repeat_interleave(NVFP4_BLOCK, dim=0)[
            :columns
        ]
        self._columnwise_scale_inv = columnwise_scale
        self._amax_columnwise = amax.clone()

    def _shape_from_buffers(self) -> tuple[int, ...]:
        rowwise = self._rowwise_data  # type: ignore[attr-defined]
        if rowwise is not None:
            return (*rowwise.shape[:-1], 2 * rowwise.shape[-1])
        transposed = self._columnwise_data  # type: ignore[attr-defined]
        return (2 * transposed.shape[-1], transposed.shape[0])


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`NVFP4TensorStorage`."""
