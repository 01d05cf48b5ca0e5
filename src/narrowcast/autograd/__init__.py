"""Autograd functions: the boundaries between modules and operators."""

from .activation import activate
from .grouped_linear import GroupedLinearArgs, grouped_linear
from .layernorm_linear import LayerNormLinearFwdArgs, layernorm_linear
from .layernorm_mlp import LayerNormMLPFwdArgs, layernorm_mlp
from .linear import (
    DelayedTensors,
    LinearBwdArgs,
    LinearCaching,
    LinearFwdArgs,
    LinearNeeds,
    LinearNumerics,
    LinearWgrad,
    add_to_main_grad_,
    compute_wgrad,
    linear,
    quantize_input_gradient,
    quantize_output,
)
from .norm import normalize
from .stages import NormNeeds

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
    "NormNeeds",
    "activate",
    "add_to_main_grad_",
    "compute_wgrad",
    "grouped_linear",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "normalize",
    "quantize_input_gradient",
    "quantize_output",
]
