"""Basic operations: one op, or a close family, per file."""

from .activation import GEGLU, GELU, GLU, QGEGLU, QGELU, ReGLU, ReLU, SiLU, SReGLU, SReLU
from .basic_linear import BasicLinear
from .bias import Bias
from .collective import AllGather, AllReduce, ReduceScatter
from .dropout import Dropout
from .glu_channels import deinterleave_glu_tensor, interleave_glu_tensor
from .grouped_linear import GroupedLinear
from .moves import AddExtraInput, ConstantScale, Identity, MakeExtraOutput, Reshape
from .norm import L2Normalization, LayerNorm, RMSNorm
from .quantize import Quantize
from .scaled_activation import ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from .swiglu import ClampedSwiGLU, SiTUGLU, SwiGLU

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "deinterleave_glu_tensor",
    "interleave_glu_tensor",
]
