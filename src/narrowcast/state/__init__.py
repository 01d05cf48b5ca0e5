"""State of a thread, which recipe is in force there, and state of delayed scaling."""

from .autocast import (
    THREAD,
    autocast,
    checked_recipe,
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
    register_delayed,
    set_autocast_state,
    with_fp8_parameters,
)
from .delayed_scaling import DelayedSlots, DelayedState, fp8_max, reduce_amax, renew, renew_and_read
from .recipe_state import RecipeState

__all__ = [
    "THREAD",
    "DelayedSlots",
    "DelayedState",
    "RecipeState",
    "autocast",
    "checked_recipe",
    "checkpoint",
    "fp8_autocast",
    "fp8_max",
    "fp8_model_init",
    "get_autocast_state",
    "get_default_recipe",
    "get_fp8_group",
    "get_fp8_recipe",
    "is_fp8_calibration",
    "is_fp8_enabled",
    "quantized_model_init",
    "reduce_amax",
    "register_delayed",
    "renew",
    "renew_and_read",
    "set_autocast_state",
    "with_fp8_parameters",
]
