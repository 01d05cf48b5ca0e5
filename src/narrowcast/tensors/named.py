"""The storages and tensors of the formats by name: each is the one implementation with the record of its format.

A class has a body of its own only where a format can make its column-wise data from the row-wise ones without rounding
again: per-tensor FP8, whose codes do not depend on the direction, and the formats with square tiles, where a tile keeps
its scale when it is transposed.
"""

from __future__ import annotations

from typing import Any

from .. import formats
from ..functional import transpose_codes
from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP4Tensor",
    "MXFP4TensorStorage",
    "MXFP6Tensor",
    "MXFP6TensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
]


class Float8TensorStorage(QuantizedTensorStorage):
    """Per-tensor FP8: ``_data`` uint8 (*lead, K); ``_transpose`` uint8 (K, *lead); ``_scale_inv`` fp32 (1,)."""

    _LAYOUT = formats.FLOAT8

    def _turns(self) -> bool:
        return True

    def _create_columnwise(self) -> None:
        self._transpose = transpose_codes(self._data)  # type: ignore[attr-defined]


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """128-block FP8: data uint8 (*lead, K) and (K, *lead); scales fp32, for 1x128 blocks stored scale-row first."""

    _LAYOUT = formats.FLOAT8_BLOCK_1D

    def _turns(self) -> bool:
        return self._quantizer.block_scaling_dim == 2  # type: ignore[attr-defined]

    def _create_columnwise(self) -> None:
        if not self._turns():
            super()._create_columnwise()
        self._transpose_rowwise()


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8: data uint8 in logical shape for both directions; scales E8M0 bytes, padded to 128 x 4."""

    _LAYOUT = formats.MXFP8

    def _turns(self) -> bool:
        return self._quantizer.with_2d_quantization  # type: ignore[attr-defined]


class MXFP6TensorStorage(QuantizedTensorStorage):
    """MXFP6: four codes in three bytes, (*lead, 3/4 K) and transposed (K, 3/4 M), zero-padded to blocks of 32."""

    _LAYOUT = formats.MXFP6


class MXFP4TensorStorage(QuantizedTensorStorage):
    """MXFP4: two codes per byte, (*lead, K/2) and transposed (K, M/2), zero-padded to blocks of 32."""

    _LAYOUT = formats.MXFP4


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4: two codes per byte, (*lead, K/2) and transposed (K, M/2), zero-padded to blocks of 16; fp32 amaxes."""

    _LAYOUT = formats.NVFP4

    def _turns(self) -> bool:
        """Not where each direction chooses its scales, or rounds, for itself."""
        q: Any = self._quantizer
        return q.with_2d_quantization and not (q.with_rht or q.nvfp4_use_4over6 or q.stochastic_rounding)

    def _create_columnwise(self) -> None:
        if not self._quantizer.with_2d_quantization or self._quantizer.with_rht:  # type: ignore[attr-defined]
            super()._create_columnwise()
        self._transpose_rowwise()
        self._amax_columnwise = self._amax_rowwise.clone()  # type: ignore[attr-defined]


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """One format row-wise, another column-wise; three buffers each, those that a format lacks hold no elements."""

    _LAYOUT = formats.HYBRID


class IdentityTensorStorage(QuantizedTensorStorage):
    """High precision: one buffer ``_hp_data`` in logical shape serves both directions."""

    _LAYOUT = formats.IDENTITY


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8TensorStorage`."""


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8BlockwiseQTensorStorage`."""


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP8TensorStorage`."""


class MXFP6Tensor(MXFP6TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP6TensorStorage`."""


class MXFP4Tensor(MXFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP4TensorStorage`."""


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`NVFP4TensorStorage`."""


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """Tensor over :class:`HybridQuantizedTensorStorage`."""


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """Tensor over :class:`IdentityTensorStorage`."""
