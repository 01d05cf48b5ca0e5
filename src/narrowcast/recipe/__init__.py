"""Recipes: frozen descriptions of how a layer quantizes each operand of its three GEMMs.

Two recipes with equal fields are equal, so entering one instead of the other changes nothing and compiles nothing anew.
What a layer does under one is its :class:`LinearPlan`.
"""

from .as_json import recipes_from_json, recipes_to_json
from .base import (
    BACKWARD_TENSOR_TYPES,
    FORWARD_TENSOR_TYPES,
    Format,
    MMParams,
    Mode,
    QParams,
    Recipe,
    remember,
    share_plans,
    tensor_type_at,
)
from .block import Float8BlockScaling, NVFP4BlockScaling
from .current import Float8CurrentScaling
from .custom import CustomRecipe, get_align_size_for_quantization
from .delayed import (
    DelayedScaling,
    DelayedScalingRequest,
    QuantizerRequest,
    first_scale,
    fp8_max,
    resolve_both,
)
from .mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from .names import ALIASES, NAMES, nearest_recipe, recipe_from_name, recipe_name
from .plan import LinearPlan, eager_only, linear_plan
from .rows import Float8RowwiseScaling

__all__ = [
    "ALIASES",
    "BACKWARD_TENSOR_TYPES",
    "FORWARD_TENSOR_TYPES",
    "NAMES",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "LinearPlan",
    "MMParams",
    "MXFP4BlockScaling",
    "MXFP6BlockScaling",
    "MXFP8BlockScaling",
    "Mode",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRequest",
    "Recipe",
    "eager_only",
    "first_scale",
    "fp8_max",
    "get_align_size_for_quantization",
    "linear_plan",
    "nearest_recipe",
    "recipe_from_name",
    "recipe_name",
    "recipes_from_json",
    "recipes_to_json",
    "remember",
    "resolve_both",
    "share_plans",
    "tensor_type_at",
]
