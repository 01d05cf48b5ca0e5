"""Recipes by name: the one table that Python, JSON and the command line read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .. import _keywords
from .._checks import of_number_format, shown, typed
from .base import Recipe
from .block import Float8BlockScaling, NVFP4BlockScaling
from .current import Float8CurrentScaling
from .delayed import DelayedScaling
from .mx import MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from .rows import Float8RowwiseScaling

NAMES: Mapping[str, type[Recipe]] = MappingProxyType(
    {
        "delayed": DelayedScaling,
        "current": Float8CurrentScaling,
        "rowwise": Float8RowwiseScaling,
        "block": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
        "nvfp4": NVFP4BlockScaling,
        "mxfp6": MXFP6BlockScaling,
        "mxfp4": MXFP4BlockScaling,
    }
)
"""Recipe classes by name."""

ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {"tensorwise": ("current", {}), "rowwise_with_gw_hp": ("rowwise", {"high_precision_wgrad": True})}
)
"""torchao's names of recipes that have another name here, and the fields that they set."""


def recipe_from_name(name: str, **fields: Any) -> Recipe:
    """Make a recipe from its name.

    Args:
        name: in :data:`NAMES` or :data:`ALIASES`.
        **fields: of the recipe, such as ``emulate``; the others keep their defaults.
    Raises:
        ValueError: no recipe has this name.
        TypeError: the name is no text, or the recipe has no such field.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {typed(name)}; {_KNOWN}")
    name, preset = ALIASES.get(name, (name, {}))
    cls = NAMES.get(name)
    if cls is None:
        raise ValueError(unknown_recipe(name))
    return cls(**{**preset, **fields})


def unknown_recipe(name: str, none: str = "None is high precision") -> str:
    """Return the message for a name that no recipe has; ``none`` says what is high precision, or what None means."""
    if name.lower() in _HIGH_PRECISION:
        return f"no recipe is named {shown(name)}; {none}; {_KNOWN}"
    return f"no recipe is named {shown(name)}{nearest_recipe(name)}; {_KNOWN}; {none}"


def recipe_name(recipe: Recipe | None) -> str:
    """Return the short form of a recipe: its name, and the fields that are not at their defaults; "None" of None."""
    if recipe is None:
        return "None"
    cls = type(recipe)
    name = next((name for name, known in NAMES.items() if known is cls), "")
    if not name:
        return cls.__name__
    return name + repr(recipe).removeprefix(cls.__name__).removesuffix("()")


def nearest_recipe(name: str) -> str:
    """Return the names that look like ``name``, or whose classes do, as part of a message; "" without any."""
    if name.lower() in ("fp8", "float8"):
        return "; for FP8 start with 'current'"
    if name.lower() in NAMES:
        return f"; the nearest: {shown(name.lower())}"
    classes = {cls.__name__.lower(): known for known, cls in NAMES.items()}
    if name.lower() in classes:
        return f"; the nearest: {shown(classes[name.lower()])}, the name of that class"
    known = of_number_format(name.lower(), [*NAMES, *ALIASES, *classes])
    alike = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.6)
    nearest = dict.fromkeys(classes.get(one, one) for one in alike)
    return f"; the nearest: {', '.join(map(repr, nearest))}" if nearest else ""


_HIGH_PRECISION = ("none", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "high_precision")
_KNOWN = "use one of " + ", ".join(map(repr, [*NAMES, *ALIASES]))
_keywords.RECIPES += [*NAMES, *ALIASES]
