"""Base classes that modules and operations share: a recipe, its state, parameters and their gradients."""

from .delayed import DelayedLayer
from .extra_state import names_apart, state_names
from .grouped_layer import GroupedLinearLayer
from .linear_layer import LinearLayer, Stage
from .parameters import (
    checked_input,
    main_grad_of,
    mark_added_to_main_grad,
    parameter_device,
    quantize_parameter,
)
from .quantized_weight import quantize_weight, scatter_workspace
from .recipe_owner import RecipeOwner, not_for_jit, refuse_script
from .renewal import reduce_delayed_scaling, renew_delayed_scaling, renew_with
from .set_recipe import get_recipes, set_recipe
from .snapshot import Snapshot
from .written_weights import WeightCodes, WrittenWeight
