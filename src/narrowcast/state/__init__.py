"""Global state: the recipe in force, and delayed scaling's buffers."""

from .autocast import (
    STATE,
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    get_autocast_state,
    get_default_recipe,
    get_fp8_group,
    get_fp8_recipe,
    is_fp8_calibration,
    is_fp8_enabled,
    quantized_model_init,
    set_autocast_state,
    with_fp8_parameters,
)
from .delayed_scaling import (
    DelayedScalingState,
    delayed_generation,
    register_delayed_state,
    update_delayed_states,
)
from .recipe_state import RecipeState

__all__ = [
    "STATE",
    "DelayedScalingState",
    "RecipeState",
    "autocast",
    "checkpoint",
    "delayed_generation",
    "fp8_autocast",
    "fp8_model_init",
    "get_autocast_state",
    "get_default_recipe",
    "get_fp8_group",
    "get_fp8_recipe",
    "is_fp8_calibration",
    "is_fp8_enabled",
    "quantized_model_init",
    "register_delayed_state",
    "set_autocast_state",
    "update_delayed_states",
    "with_fp8_parameters",
]
