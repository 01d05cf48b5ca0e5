"""Quantizers: frozen policies that say how a tensor is quantized."""

import torch

from ..formats import DType
from .float8 import DelayedFloat8Quantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from .float8_blockwise import Float8BlockQuantizer
from .handle import OperandHandles, QuantizerHandle, handle_of, quantize_gradient, quantize_operand
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .producers import (
    ActivationSettings,
    NormSettings,
    quantize_activation,
    quantize_activation_gradient,
    quantize_norm,
    quantize_norm_gradient,
)
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
    "ActivationSettings",
    "DelayedFloat8Quantizer",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "NormSettings",
    "OperandHandles",
    "Quantizer",
    "QuantizerHandle",
    "handle_of",
    "quantize_activation",
    "quantize_activation_gradient",
    "quantize_gradient",
    "quantize_norm",
    "quantize_norm_gradient",
    "quantize_operand",
]
