"""State of a thread, which recipe is in force there, and state of delayed scaling."""

from .autocast import (
    THREAD,
    AutocastState,
    autocast,
    checked_recipe,
    entered_in_backward,
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
    starts_a_step,
    with_fp8_parameters,
)
from .delayed_scaling import (
    OWNERS,
    Agreement,
    DelayedSlots,
    asks_callables,
    reduce_amax,
    renew,
    warn_of_no_reduction,
    warn_of_no_renewal,
)
from .random_states import CudaRNGStatesTracker, register_random_states
from .recipe_state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
)
from .recompute import (
    checkpoint,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
