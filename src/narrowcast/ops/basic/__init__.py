"""Basic operations: one op, or a close family, per file."""

from .activation import GEGLU, GELU, GLU, QGEGLU, QGELU, ReGLU, ReLU, SiLU, SReGLU, SReLU
from .add_extra_input import AddExtraInput
from .basic_linear import BasicLinear
from .bias import Bias
from .collective import AllGather, AllReduce, ReduceScatter
from .constant_scale import ConstantScale
from .dropout import Dropout
from .glu_channels import deinterleave_glu_tensor, interleave_glu_tensor
from .grouped_linear import GroupedLinear
from .identity import Identity
from .l2normalization import L2Normalization
from .layer_norm import LayerNorm
from .make_extra_output import MakeExtraOutput
from .quantize import Quantize
from .reshape import Reshape
from .rmsnorm import RMSNorm
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
