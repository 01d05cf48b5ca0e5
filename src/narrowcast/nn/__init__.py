"""Modules: parameters, resolution of the recipe, one call."""

from ..layers import quantize_weight, scatter_workspace
from .dot_product_attention import DotProductAttention
from .fused_calls import norm_linear, norm_mlp
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .moe_router import MoERouter, Routing
from .multihead_attention import MultiheadAttention
from .norm import LayerNorm, RMSNorm
from .padding import Fp8Padding, Fp8Unpadding
from .transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MoERouter",
    "MultiheadAttention",
    "RMSNorm",
    "Routing",
    "TransformerLayer",
    "norm_linear",
    "norm_mlp",
    "quantize_weight",
    "scatter_workspace",
]
