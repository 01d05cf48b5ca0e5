"""Autograd functions: the boundaries between modules and operators."""

from .activation import ActivationSettings, activate
from .arguments import DelayedScales, LinearBwdArgs, LinearFwdArgs, LinearWgrad
from .concatenate import concatenate
from .grouped_linear import Groups, grouped_linear
from .layernorm_linear import LayerNormLinearFwdArgs, layernorm_linear
from .layernorm_mlp import LayerNormMLPFwdArgs, layernorm_mlp
from .linear import linear
from .norm import NormSettings, normalize
from .quantized_boundary import quantize_input_gradient, quantize_output
from .weight_gradient import add_to_main_grad_, compute_wgrad

__all__ = [
    "ActivationSettings",
    "DelayedScales",
    "Groups",
    "LayerNormLinearFwdArgs",
    "LayerNormMLPFwdArgs",
    "LinearBwdArgs",
    "LinearFwdArgs",
    "LinearWgrad",
    "NormSettings",
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
