"""Fused operations and the order in which their patterns are looked for."""

from ..registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .backward_activation_bias import BACKWARD_ACTIVATION_BIAS, BackwardActivationBias
from .backward_add_rmsnorm import BACKWARD_ADD_RMSNORM, BackwardAddRMSNorm
from .backward_linear import (
    BACKWARD_LINEAR_ADD,
    BACKWARD_LINEAR_SCALE,
    BackwardLinearAdd,
    BackwardLinearScale,
)
from .forward_linear import (
    FORWARD_LINEAR_BIAS_ACTIVATION,
    FORWARD_LINEAR_BIAS_ADD,
    FORWARD_LINEAR_SCALE_ADD,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from .grouped_gated_mlp import GROUPED_GATED_MLP, GroupedGatedMLP
from .grouped_mlp import GROUPED_MLP
from .pattern import Fusion, Match, NearMiss, follows

JOINT_FUSIONS: tuple[Fusion, ...] = (GROUPED_MLP, GROUPED_GATED_MLP)
FORWARD_FUSIONS: tuple[Fusion, ...] = (
    FORWARD_LINEAR_BIAS_ADD,
    FORWARD_LINEAR_BIAS_ACTIVATION,
    FORWARD_LINEAR_SCALE_ADD,
)
BACKWARD_FUSIONS: tuple[Fusion, ...] = (
    BACKWARD_LINEAR_ADD,
    BACKWARD_LINEAR_SCALE,
    BACKWARD_ACTIVATION_BIAS,
    BACKWARD_ADD_RMSNORM,
)

_REGISTER = {
    "both": register_forward_backward_fusion,
    "forward": register_forward_fusion,
    "backward": register_backward_fusion,
}
for _fusion in (*JOINT_FUSIONS, *FORWARD_FUSIONS, *BACKWARD_FUSIONS):
    _REGISTER[_fusion.direction](_fusion)

__all__ = [
    "BACKWARD_FUSIONS",
    "FORWARD_FUSIONS",
    "JOINT_FUSIONS",
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "Fusion",
    "GroupedGatedMLP",
    "Match",
    "NearMiss",
    "follows",
]
