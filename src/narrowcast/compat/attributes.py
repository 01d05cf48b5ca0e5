"""Transformer Engine's names for what tensors and storages tell of themselves: one table, put on their classes here.

``import narrowcast`` imports this file, so that every tensor has them.
"""

from __future__ import annotations

from typing import Any

from ..tensors import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    HybridQuantizedTensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
)


def _option(name: str) -> property:
    """An option of the tensor's quantizer."""
    return property(lambda tensor: getattr(tensor._quantizer, name))


_ELEMENTS = {"_fp8_dtype": _option("dtype"), "_with_gemm_swizzled_scales": False}

ATTRIBUTES: dict[type, dict[str, Any]] = {
    QuantizedTensorStorage: {"_get_quantizer": lambda tensor: tensor._quantizer},
    Float8TensorStorage: {
        **_ELEMENTS,
        "_transpose_invalid": property(lambda tensor: tensor._transpose is None),
    },
    Float8BlockwiseQTensorStorage: {
        **_ELEMENTS,
        "_is_2D_scaled": property(lambda tensor: tensor._quantizer.block_scaling_dim == 2),
    },
    HybridQuantizedTensorStorage: {
        "_rowwise_storage": HybridQuantizedTensorStorage.rowwise_sub_storage,
        "_columnwise_storage": HybridQuantizedTensorStorage.columnwise_sub_storage,
    },
    MXFP8TensorStorage: _ELEMENTS,
    NVFP4TensorStorage: {
        "_fp4_dtype": _option("dtype"),
        "_row_scaled_nvfp4": _option("row_scaled_nvfp4"),
        "_nvfp4_use_4over6": _option("nvfp4_use_4over6"),
        "_with_gemm_swizzled_scales": False,
    },
}

for _owner, _names in ATTRIBUTES.items():
    for _name, _value in _names.items():
        setattr(_owner, _name, _value)
