"""Transformer Engine's names for what tensors and storages tell of themselves: one table, put on their classes here.

``import narrowcast`` imports this file, so that every tensor has them.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..layers import RecipeOwner
from ..tensors import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    HybridQuantizedTensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
)


def _option(name: str) -> property:
    """Return an option of the tensor's quantizer."""
    return property(lambda tensor: getattr(tensor._quantizer, name))


class _Absent:
    """An attribute that warns of what replaces it, and is not there.

    The warning is the answer: ``nn.Module`` replaces an AttributeError by its own, and ``hasattr`` stays False.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is not None:
            warnings.warn(f"{owner.__name__}.{self._name} is not there: {self._reason}", stacklevel=2)
        raise AttributeError(self._name)


def _names_that_are_there(layer: Any) -> list[str]:
    """Return the names of a layer's attributes; ``torch.jit.trace`` asks for each of them."""
    return [name for name in nn.Module.__dir__(layer) if name != "fp8_meta"]


_ELEMENTS = {"_fp8_dtype": _option("dtype"), "_with_gemm_swizzled_scales": False}

_META = "layer.recipe is the recipe; with delayed scaling layer.scale, layer.amax_history and layer.amax are its state"

ATTRIBUTES: dict[type, dict[str, Any]] = {
    RecipeOwner: {"fp8_meta": _Absent("fp8_meta", _META), "__dir__": _names_that_are_there},
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
