"""``set_recipe``: give the layers of a model their recipes, and the model the renewal of their delayed scaling."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _checks
from .._tracing import traced_local, while_tracing
from ..functional.recomputation import RUNNING
from ..recipe import CustomRecipe, DelayedScaling, Recipe, recipes_from_json
from ..state import THREAD, Agreement, checked_recipe, reduce_amax, renew, warn_of_saturation
from ..upstream.autograd import is_in_backward
from ..upstream.compiler import never_compiled
from ..upstream.modules import calling_frame, forward_hooks, forward_pre_hooks, modules_of
from .delayed import DelayedLayer
from .patterns import matching_names
from .policies import choose, policy_named
from .recipe_owner import RecipeOwner

Model = TypeVar("Model", bound=nn.Module)
RecipeChoice = Recipe | str | Mapping[str, Recipe | str | None] | None

# Model -> (name of a group -> what its ranks have compared). Not an attribute of the model: a copy, or
# a model that was loaded, must be compared again.
_AGREED: WeakKeyDictionary[nn.Module, dict[str, Agreement]] = WeakKeyDictionary()


def set_recipe(
    model: Model,
    recipe: RecipeChoice,
    *,
    policy: str | None = None,
    rows: int | None = None,
) -> Model:
    """Give every low-precision layer of a model its own recipe; no ``autocast`` is needed then.

    ``model`` renews the scales of its delayed layers at the start of each of its training forwards, in a few launches.
    Layers that run outside its forward, as parts, renew their own.

    Args:
        model: the model, or any part of one.
        recipe: one for all layers: a recipe, its name (:data:`narrowcast.recipe.NAMES`), or None for high precision. Or
            a table of module-name patterns, in which later patterns override earlier ones: ``{"": R, "layers.*.mlp":
            "block", "lm_head": None}``. A pattern selects the modules it matches and all modules inside them; ``*`` is
            one part of a name, ``**`` any number, "" the model itself. Or such a table as JSON
            (:func:`narrowcast.recipe.recipes_to_json`).
        policy: "auto" keeps in high precision the layers that are faster so on this GPU at their sizes, as timed once;
            "auto-graphs" times CUDA graph replays (:mod:`narrowcast.policy`); None times nothing.
        rows: rows of a layer per call, batch x tokens; for a policy.
    Returns:
        ``model``.
    Raises:
        TypeError: ``recipe`` is not a recipe.
        ValueError: a pattern matches no low-precision layer, the model has none, or a policy is unknown or lacks
            ``rows``.
        RuntimeError: a policy without a GPU.
    """
    _checks.module("model", model)
    table = recipe_table(recipe, "set_recipe")
    owners = {name: module for name, module in model.named_modules() if isinstance(module, RecipeOwner)}
    if not owners:
        raise ValueError(
            f"this {type(model).__name__} has no low-precision layer; call narrowcast.convert(model, recipe) first"
        )
    chosen: dict[str, Recipe | None] = {}
    for pattern, value in table.items():
        chosen.update(dict.fromkeys(matching_names(pattern, owners, model, "low-precision layer"), value))
    if policy is not None:
        policy_named(policy, rows)
        chosen = {name: choose(owners[name], value, policy, rows) for name, value in chosen.items()}  # type: ignore[arg-type]
    for name, value in chosen.items():
        owners[name].recipe = value
    renew_from(model)
    return model


def recipe_table(recipe: RecipeChoice, caller: str) -> dict[str, Recipe | None]:
    """Return recipes by pattern, from any of the ways in which :func:`set_recipe` takes them.

    Args:
        caller: whose argument it is, for the message.
    Raises:
        TypeError: no recipe.
        ValueError: text that is neither the name of a recipe nor a table of recipes.
    """
    is_json = isinstance(recipe, str) and recipe.lstrip()[:1] in ("{", "[")
    table: Any = recipes_from_json(recipe) if is_json else recipe  # type: ignore[arg-type]
    table = dict(table) if isinstance(table, Mapping) else {"": table}
    return {pattern: checked_recipe(value, caller) for pattern, value in table.items()}


def renew_from(model: nn.Module) -> None:
    """Make ``model`` renew the scales of its delayed layers when it is called in training.

    Outside its forward they renew their own: a pipeline, or ``checkpoint_sequential``, calls its parts alone.
    """
    delayed = [
        layer for layer in model.modules() if isinstance(layer, DelayedLayer) and layer.delayed_slots()
    ]
    hooks: Any = forward_pre_hooks(model)
    if delayed and _start_root not in hooks.values():
        model.__dict__["_renews_as"] = f"root{next(_ROOTS)}"
        model.register_forward_pre_hook(_renew_root)
        model.register_forward_pre_hook(_start_root)
        model.register_forward_hook(_leave_root, always_call=True)


def stop_renewing_from(model: nn.Module) -> None:
    """Undo :func:`renew_from`."""
    for hooks in (forward_pre_hooks(model), forward_hooks(model)):
        for key in [key for key, hook in hooks.items() if hook in (_renew_root, _start_root, _leave_root)]:
            del hooks[key]
    model.__dict__.pop("_renews_as", None)


def get_recipes(model: nn.Module) -> dict[str, Recipe | None]:
    """Return the recipe of every low-precision layer, by the layer's name."""
    _checks.module("model", model)
    return {name: module.recipe for name, module in model.named_modules() if isinstance(module, RecipeOwner)}


_ROOTS = itertools.count()


@never_compiled
def _renew_root(model: nn.Module, args: Any) -> None:
    """Renew: a forward pre-hook of a model.

    Dynamo compiles the hooks of a compiled model one by one. A graph of this one would have all states as inputs, to
    run one operator.
    """
    renew_layers(model)


def _start_root(model: nn.Module, args: Any) -> None:
    """Keep the layers from renewing until the forward ends: a forward pre-hook of a model."""
    _note_root(model.__dict__["_renews_as"], True)


def _leave_root(model: nn.Module, args: Any, output: Any) -> None:
    _note_root(model.__dict__["_renews_as"], False)


def _note_root(name: str, runs: bool) -> None:
    """Note that the forward of a root begins or ends: a graph among what it guards, eager code where graphs look."""
    if torch.compiler.is_compiling():
        others = [root for root in THREAD.state.roots if root != name]  # an exception may have left it there
        THREAD.state.roots = (*others, name) if runs else tuple(others)
    elif runs:
        RUNNING.enter(name, calling_frame(2))
    else:
        RUNNING.leave(name)


def renew_layers(model: nn.Module) -> None:
    """Renew the scales of all delayed layers of a model, which then leave that to it.

    Not in evaluation, nor in a backward, whose recomputation reads the scales of its forward.

    Raises:
        RuntimeError: in a graph, inside a checkpoint.
    """
    if torch.compiler.is_compiling():
        layers = [layer for layer in model.modules() if isinstance(layer, DelayedLayer)]
        while_tracing(_renewed_by_root_while_tracing)
        if model.training:
            renew(layers)
    elif not is_in_backward() and model.training:
        layers = []
        for layer in modules_of(model):
            if isinstance(layer, DelayedLayer):
                layer.__dict__.update(_renewed_by_root=True, _root=model.__dict__.get("_renews_as"))
                layers.append(layer)
        _keep_state_in_force(layers)
        warn_of_saturation(layers)
        renew(layers)


def _keep_state_in_force(layers: list[DelayedLayer]) -> None:
    """Give layers the histories and the rule of the autocast in force, which a copy does not know; or their own again.

    A graph of theirs does not, where it serves again after an autocast.
    """
    depth, of_autocast = THREAD.state.depth, THREAD.state.recipe
    for layer in layers:
        in_force = of_autocast if depth else layer.recipe if layer._registered_with else None
        if layer.training and isinstance(in_force, (DelayedScaling, CustomRecipe)):
            layer._keep_state_of(in_force)


def _renewed_by_root_while_tracing(context: Any) -> None:
    model, layers = traced_local(context, "model"), traced_local(context, "layers")
    from ..upstream import dynamo  # loads Dynamo, which is there already where code is traced

    _keep_state_in_force(layers)  # before the graph reads the histories of the layers' own recipes
    if model.training:
        for layer in layers:
            layer.__dict__.update(_renewed_by_root=True, _root=model.__dict__.get("_renews_as"))
    delayed = any(layer._delayed for layer in layers)
    if delayed and dynamo.is_in_subgraph(context):
        raise RuntimeError(
            "the model that set_recipe was called with renews its scales inside a compiled torch.utils.checkpoint, "
            "which would renew them again in the backward; call set_recipe with the model around the checkpoint"
        )


def reduce_delayed_scaling(model: nn.Module, group: Any = None) -> None:
    """Reduce the collected amax of a model's delayed layers over ranks, by MAX; call it after every backward.

    One all-reduce whose layout follows only from ``model.modules()``: ranks may run different layers, or not have their
    state yet. The first call for a group also compares sizes. Call it before the next training forward, which renews:
    with accumulated gradients once per microbatch. Otherwise scales and histories differ between ranks, and a
    checkpoint holds those of one rank. A warning says so once, on a GPU in a later call. Recipes with
    ``reduce_amax=False`` take no part.

    Args:
        group: process group of the ranks with equal models; None is the default group.
    Raises:
        RuntimeError: the ranks' models have layers of different sizes; raised on all ranks.
    """
    states = [
        state
        for layer in model.modules()
        if isinstance(layer, DelayedLayer)
        for state in layer.amax_to_reduce()
    ]
    agreements = _AGREED.setdefault(model, {})
    reduce_amax(states, group, agreements.setdefault(getattr(group, "group_name", ""), Agreement()))
