"""``set_recipe``: give the layers of a model their recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from .. import _checks
from ..functional.collectives import checked_group
from ..recipe import Recipe, recipes_from_json
from ..state import checked_recipe
from .patterns import matching_names, of_torch_ao
from .policies import choose, policy_named
from .recipe_owner import RecipeOwner
from .renewal import renew_with

Model = TypeVar("Model", bound=nn.Module)
RecipeChoice = Recipe | str | Mapping[str, Recipe | str | None] | None


def set_recipe(
    model: Model,
    recipe: RecipeChoice,
    *,
    policy: str | None = None,
    rows: int | None = None,
    amax_group: Any = None,
) -> Model:
    """Give every low-precision layer of a model its own recipe; no ``autocast`` is needed then.

    Under delayed scaling the optimizer's step renews the scales of the layers whose weights it changes, and those of
    the model's frozen layers (:func:`narrowcast.renew_delayed_scaling`).

    Args:
        model: the model, or any part of one.
        recipe: one for all layers: a recipe, its name (:data:`narrowcast.recipe.NAMES`), or None for high precision. Or
            a table of module-name patterns, in which later patterns override earlier ones: ``{"": R, "layers.*.mlp":
            "block", "lm_head": None}``. A pattern selects the modules it matches and all modules inside them; ``*`` is
            one part of a name, ``**`` any number, "" the model itself. Or such a table as JSON
            (:func:`narrowcast.recipe.recipes_to_json`). None also matches plain modules, and changes nothing there.
        policy: "auto" keeps in high precision the layers that are faster so on this GPU at their sizes, as timed once;
            "auto-graphs" times CUDA graph replays (:mod:`narrowcast.policy`); None times nothing.
        rows: rows of a layer per call, batch x tokens; for a policy.
        amax_group: process group of the ranks with equal models. Each step then reduces the amaxes of delayed scaling
            over it (:func:`narrowcast.reduce_delayed_scaling`) and renews all layers together. None: as before.
    Returns:
        ``model``.
    Raises:
        TypeError: ``recipe`` is not a recipe, or ``amax_group`` no process group.
        ValueError: a pattern matches no low-precision layer, the model has none, or a policy is unknown or lacks
            ``rows``.
        RuntimeError: a policy without a GPU.
    """
    _checks.module("model", model)
    amax_group = checked_group(amax_group, "amax_group")
    table = recipe_table(recipe, "set_recipe")
    owners = {name: module for name, module in model.named_modules() if isinstance(module, RecipeOwner)}
    if not owners:
        raise ValueError(
            f"this {type(model).__name__} has no low-precision layer; "
            + (of_torch_ao(model) or "call narrowcast.convert(model, recipe) first")
        )
    chosen: dict[str, Recipe | None] = {}
    for pattern, value in table.items():
        # None on a plain layer is what that is already
        names = dict(model.named_modules()) if value is None else owners
        matching = matching_names(pattern, names, model, "low-precision layer", "recipe")
        chosen.update((name, value) for name in matching if name in owners)
    if policy_named(policy, rows) is not None:
        chosen = {name: choose(owners[name], value, policy, rows) for name, value in chosen.items()}  # type: ignore[arg-type]
    for name, value in chosen.items():
        owners[name].recipe = value
    renew_with(model, () if amax_group is None else (amax_group,))
    return model


def recipe_table(recipe: RecipeChoice, caller: str, *none: str) -> dict[str, Recipe | None]:
    """Return recipes by pattern, from any of the ways in which :func:`set_recipe` takes them.

    Args:
        caller: whose argument it is, for the message.
        none: what None means there, if it is not high precision.
    Raises:
        TypeError: no recipe, or a pattern that is no text.
        ValueError: text that is neither the name of a recipe nor a table of recipes, or a table without any.
    """
    table: Any = recipe
    if isinstance(recipe, str) and recipe.lstrip()[:1] in ("{", "["):
        try:
            table = recipes_from_json(recipe)
        except ValueError as error:
            raise ValueError(f"{caller}: recipe: {error}") from error
    table = dict(table) if isinstance(table, Mapping) else {"": table}
    if not table:
        raise ValueError(f'{caller} got an empty table of recipes; name a pattern, or "" for the whole model')
    for pattern in table:
        if not isinstance(pattern, str):
            raise TypeError(
                f'{caller}: {_checks.typed(pattern)}, is no pattern; name modules by text, as in {{"layers.*": ...}}'
            )
    return {
        pattern: checked_recipe(value, f"{caller}: {_checks.shown(pattern)}" if pattern else caller, *none)
        for pattern, value in table.items()
    }


def get_recipes(model: nn.Module) -> dict[str, Recipe | None]:
    """Return the recipe of every low-precision layer, by the layer's name."""
    _checks.module("model", model)
    return {name: module.recipe for name, module in model.named_modules() if isinstance(module, RecipeOwner)}
