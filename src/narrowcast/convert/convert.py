"""``convert`` and ``revert``: the layers of a model become low-precision ones where they are, and turn back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..layers import DelayedLayer, RecipeOwner
from ..layers.set_recipe import matching_names, recipe_table, renew_from, renew_layers
from ..recipe import Recipe
from .find import Found, gemm_modules
from .receipt import Decision, Receipt, receipt_of
from .swap import become, check_turns_back, is_converted, turn_back

Patterns = str | Sequence[str] | None


def convert(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Recipe | None] | str,
    *,
    only: Patterns = None,
    skip: Patterns = None,
    dry_run: bool = False,
) -> Receipt:
    """Have the linear layers of a model run in the precision of a recipe: in place, exactly undone by :func:`revert`.

    ``nn.Linear``, ``Conv1D`` of Transformers and the 3-D experts of Transformers 5 become layers of narrowcast that own
    their recipe. The module objects stay, with their parameters, ties, hooks and attributes; no key and no value of the
    state dict changes, but that ``DelayedScaling`` adds its state. Everything else that holds the weight of a GEMM is
    named in the receipt with the reason why it stayed. Layers of narrowcast keep the recipe they have.

    Args:
        model: what is called: it renews the scales of delayed scaling.
        recipe: one for all, or one by pattern as :func:`narrowcast.set_recipe` takes them; what no pattern matches, or
            None is given for, is not converted.
        only, skip: patterns of module names: nothing else is converted, these are not.
        dry_run: change nothing, and return the receipt of what would be done.
    Returns:
        the receipt: every module with the weight of a GEMM, what was decided and why; print it.
    Raises (with nothing changed):
        TypeError: ``model`` is no module, ``recipe`` no recipe. ValueError: a pattern that matches no such module, or a
        recipe that cannot be resolved for a layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if recipe is None:
        raise TypeError("recipe is None; pass one of narrowcast.recipe's recipes, or a table of them")
    table = recipe_table(recipe, "convert")
    found = list(gemm_modules(model))
    names = [one.name for one in found]
    recipes: dict[str, Recipe | None] = {}
    for pattern, value in table.items():
        recipes.update(dict.fromkeys(_matching(pattern, names, model), value))
    chosen = set(names if only is None else _matching_any(only, names, model))
    skipped = set(_matching_any(skip, names, model)) if skip is not None else set()
    decisions = [_decide(one, recipes, chosen, skipped) for one in found]
    receipt = receipt_of(
        model, decisions, dry_run
    )  # resolves every recipe, so that what cannot be fails here
    if not dry_run:
        for one in decisions:
            if one.decision == "converted":
                layer: Any = one.found.layer
                become(one.found.module, layer, one.role_name, one.recipe)
        renew_from(model)
    return receipt


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert` for all of a model's modules: their classes and attributes are again those of before.

    Parameters keep the values that they have now; recipes and the state of delayed scaling are dropped.

    Returns:
        ``model``.
    Raises (with nothing changed):
        RuntimeError: something gave a converted module yet another class.
    """
    converted = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    for name, module in converted:
        check_turns_back(name, module)
    for _, module in converted:
        turn_back(module)
    if not any(isinstance(layer, DelayedLayer) and layer.delayed_slots() for layer in model.modules()):
        hooks: Any = model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is renew_layers]:
            del hooks[key]
    return model


def _decide(one: Found, recipes: dict[str, Recipe | None], chosen: set[str], skipped: set[str]) -> Decision:
    if isinstance(one.module, RecipeOwner):
        return Decision(one, "narrowcast", one.reason, one.module.recipe)
    if one.layer is None:
        return Decision(one, "kept", one.reason, None)
    if one.name in skipped:
        return Decision(one, "kept", "skip", None)
    if one.name not in chosen:
        return Decision(one, "kept", "not in only", None)
    recipe = recipes.get(one.name)
    if recipe is None:
        return Decision(one, "kept", "no recipe is given for it", None)
    return Decision(one, "converted", one.note, recipe)


def _matching(pattern: str, names: list[str], model: nn.Module) -> list[str]:
    return matching_names(pattern, names, model, "module with the weight of a GEMM")


def _matching_any(patterns: Patterns, names: list[str], model: nn.Module) -> list[str]:
    listed: Any = [patterns] if isinstance(patterns, str) else patterns
    return [name for pattern in listed for name in _matching(pattern, names, model)]
