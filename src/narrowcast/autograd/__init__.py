"""Autograd functions: the boundaries between modules and operators."""

from .activation import activate
from .arguments import (
    DelayedTensors,
    LinearBwdArgs,
    LinearCaching,
    LinearFwdArgs,
    LinearNeeds,
    LinearNumerics,
    LinearWgrad,
)
from .concatenate import concatenate
from .grouped_linear import GroupedLinearArgs, grouped_linear
from .layernorm_linear import LayerNormLinearFwdArgs, layernorm_linear
from .layernorm_mlp import LayerNormMLPFwdArgs, layernorm_mlp
from .linear import linear
from .norm import normalize
from .quantized_boundary import quantize_input_gradient, quantize_output
from .weight_gradient import add_to_main_grad_, compute_wgrad

__all__ = [
    "DelayedTensors",
    "GroupedLinearArgs",
    "LayerNormLinearFwdArgs",
    "LayerNormMLPFwdArgs",
    "LinearBwdArgs",
    "LinearCaching",
    "LinearFwdArgs",
    "LinearNeeds",
    "LinearNumerics",
    "LinearWgrad",
    "activate",
    "add_to_main_grad_",
    "compute_wgrad",
    "concatenate",
    "grouped_linear",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "normalize",
    "quantize_input_gradient",
    "quantize_output",
]
