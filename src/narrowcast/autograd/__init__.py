"""Autograd functions: the boundaries between modules and operators."""

from .activation import ActivationSettings, activate
from .adapter import AdaptedLinearFunction, adapter_inputs, adapter_output, adapter_product
from .arguments import (
    TO_AUTOGRAD,
    DelayedScales,
    LinearBwdArgs,
    LinearFwdArgs,
    LinearWgrad,
)
from .concatenate import concatenate
from .gemms import fprop
from .grouped_linear import grouped_linear
from .groups import Groups
from .linear import LinearFunction
from .node import traced_adapted, traced_grouped, traced_linear, traced_program
from .norm import NormSettings, normalize
from .program import Activation, Linear, Norm, NormArgs, Program, ProgramArgs, ProgramFunction
from .quantized_boundary import quantize_input_gradient, quantize_output
from .saved_activation import decoded, kept_in_codes
from .weight_gradient import add_to_main_grad_, compute_wgrad
