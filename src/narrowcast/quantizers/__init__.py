"""Quantizers: frozen policies that say how a tensor is quantized."""

import torch

from ..formats import DType
from .float8 import DelayedFloat8Quantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from .float8_blockwise import Float8BlockQuantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .operand import Operand, OperandBuffers, buffers_of
from .quantizer import Quantizer

# a quantized tensor's quantizer travels with it through torch.load(weights_only=True)
_VALUES = (
    Float8CurrentScalingQuantizer,
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    IdentityQuantizer,
)
torch.serialization.add_safe_globals([DType, Float8Quantizer, *_VALUES])

__all__ = [
    "DelayedFloat8Quantizer",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Operand",
    "OperandBuffers",
    "Quantizer",
    "buffers_of",
]
