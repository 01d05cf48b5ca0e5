"""Quantizers: frozen policies that say how a tensor is quantized."""

from typing import Any

import torch

from ..formats import DType
from ..tensors import GroupedTensorStorage, QuantizedTensorStorage
from .described import quantizer_of
from .float8 import DelayedFloat8Quantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from .float8_blockwise import Float8BlockQuantizer
from .float8_rows import Float8GroupsQuantizer, Float8RowsQuantizer
from .grouped import (
    make_grouped_tensor,
    make_grouped_tensor_from_rowwise_data,
    make_grouped_tensor_with_shapes,
    make_tensor_offsets,
)
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .mx import MXFP4Quantizer, MXFP6Quantizer, MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .operand import Operand, OperandBuffers, buffers_of
from .quantizer import Quantizer

VALUE_QUANTIZERS: tuple[type[Quantizer], ...] = (
    DelayedFloat8Quantizer,
    Float8CurrentScalingQuantizer,
    Float8BlockQuantizer,
    Float8RowsQuantizer,
    Float8GroupsQuantizer,
    MXFP8Quantizer,
    MXFP6Quantizer,
    MXFP4Quantizer,
    NVFP4Quantizer,
    IdentityQuantizer,
    HybridQuantizer,
)
"""The classes that are compile-time values: all that hold neither tensors nor process groups."""

QuantizedTensorStorage._quantizer_of = staticmethod(quantizer_of)
_MAKERS: tuple[Any, ...] = (
    make_grouped_tensor,
    make_grouped_tensor_with_shapes,
    make_grouped_tensor_from_rowwise_data,
    make_tensor_offsets,
)
for _make in _MAKERS:
    setattr(GroupedTensorStorage, _make.__name__, staticmethod(_make))

# a quantized tensor's quantizer travels with it through torch.load(weights_only=True)
torch.serialization.add_safe_globals([DType, Float8Quantizer, *VALUE_QUANTIZERS])

__all__ = [
    "VALUE_QUANTIZERS",
    "DelayedFloat8Quantizer",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8GroupsQuantizer",
    "Float8Quantizer",
    "Float8RowsQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP4Quantizer",
    "MXFP6Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Operand",
    "OperandBuffers",
    "Quantizer",
    "buffers_of",
    "make_grouped_tensor",
    "make_grouped_tensor_from_rowwise_data",
    "make_grouped_tensor_with_shapes",
    "make_tensor_offsets",
]
