"""``convert`` and ``revert``: the layers of a model become low-precision ones where they are, and turn back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

from torch import nn

from .. import _checks
from .._checks import shown, some
from ..layers import renew_with
from ..layers.described import describe_parameters
from ..layers.patterns import Selectors, matching_names, selected_names
from ..layers.policies import Policy, policy_named
from ..layers.set_recipe import Model, RecipeChoice, recipe_table
from ..recipe import Recipe, recipe_name
from ..upstream.fsdp import is_distributed, reshard
from .adapters import unmerge_exactly
from .decisions import NOT_IN_ONLY, Decision, decision_so_far, drop_reasons, record_norm_reason, record_reason
from .find_modules import ROLES, Found, FoundNorm, gemm_modules, norm_modules
from .receipt import Receipt, receipt_of
from .stored import (
    DECODED,
    check_weights,
    nothing_to_store,
    restore,
    store,
    stores,
    uses_of_parameters,
    why_not_stored,
)
from .swap import become, change_recipe, check_turns_back, is_converted, turn_back

_KIND = "linear layer"
_NONE = "skip=, or None in a table, leaves layers as they are"


@overload
def convert(
    model: Model,
    recipe: RecipeChoice,
    *,
    only: Selectors = None,
    skip: Selectors = None,
    weights: Literal["plain", "stored", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8-channel"] = "plain",
    norms: bool = False,
    routers: bool = False,
    heads: bool = False,
    small: bool = False,
    blocks: bool = False,
    dry_run: Literal[False] = False,
    policy: str | None = None,
    rows: int | None = None,
) -> Model: ...
@overload
def convert(
    model: nn.Module,
    recipe: RecipeChoice,
    *,
    only: Selectors = None,
    skip: Selectors = None,
    weights: Literal["plain", "stored", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8-channel"] = "plain",
    norms: bool = False,
    routers: bool = False,
    heads: bool = False,
    small: bool = False,
    blocks: bool = False,
    dry_run: Literal[True],
    policy: str | None = None,
    rows: int | None = None,
) -> Receipt: ...
def convert(
    model: nn.Module,
    recipe: RecipeChoice,
    *,
    only: Selectors = None,
    skip: Selectors = None,
    weights: Literal["plain", "stored", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8-channel"] = "plain",
    norms: bool = False,
    routers: bool = False,
    heads: bool = False,
    small: bool = False,
    blocks: bool = False,
    dry_run: bool = False,
    policy: str | None = None,
    rows: int | None = None,
) -> nn.Module | Receipt:
    """Convert the linear layers of a model to a recipe's precision, in place; :func:`revert` undoes it exactly.

    ``nn.Linear``, ``Conv1D`` of Transformers and the 3-D experts of Transformers 5 become layers of narrowcast that own
    their recipe. The module objects stay, with their parameters, ties, hooks and attributes. The state dict keeps its
    keys and values; only ``DelayedScaling`` adds its state. The receipt names every other module with a GEMM weight and
    the reason why it stayed. Converted modules get the new recipe; layers built from narrowcast keep their own.

    Args:
        model: the whole model, with which the scales of frozen layers are renewed under delayed scaling.
        recipe: one for all, or a table by pattern, as in :func:`narrowcast.set_recipe`: recipes or their names. Layers
            without a match, or with None, are not converted.
        only: the modules to convert: a pattern of names, a function of (name, module), or several of these.
        skip: the modules to keep, selected like ``only``.
        weights: "stored" keeps the frozen weights (``requires_grad`` False) of converted ``nn.Linear``s and stacked
            experts as one quantized copy: about half the bytes of bf16. The state dict has the copy's values.
            For recipes that quantize a weight and its transpose alike: per-tensor FP8 and 128 x 128 tiles. "nvfp4" and
            "mxfp4" keep the copy in four bits, 0.28 and 0.27 of bf16's bytes, for every recipe: each pass decodes it
            and quantizes the values under the recipe. So do "mxfp6" with 0.39, "mxfp8" with 0.52, and "fp8-channel",
            E4M3 with a scale for each row, with 0.50 of bf16's bytes.
        norms: also convert ``nn.LayerNorm`` and ``nn.RMSNorm``, without quantizing them: their numbers are the same
            eager and compiled, and on every device.
        routers: also convert ``nn.Linear``s that choose or weigh the experts of a mixture. By default they stay, since
            rounded logits send tokens to other experts.
        heads: also convert the model's output embedding. By default it stays, since its rounding affects the loss.
        small: also convert layers with fewer than 32 inputs or outputs and at least four times as many of the other. By
            default they stay: quantizing costs them more than it gains.
        blocks: also convert the first and last blocks that a recipe's authors keep in high precision: ``recipe``'s
            ``high_precision_blocks``, which NVFP4 has.
        policy, rows: as in :func:`narrowcast.set_recipe`; the receipt lists the choices and times.
        dry_run: change nothing, and return the :class:`Receipt`.
    Returns:
        ``model``; :func:`narrowcast.receipt` returns the decisions with their reasons.

    Nothing changes if it raises.

    Raises:
        TypeError: ``model`` is not a module, ``recipe`` is not a recipe, or an argument is unknown.
        ValueError: a pattern has no match, nothing selected can be converted, a recipe cannot be resolved for a layer,
            a stored weight has another recipe, a policy is unknown or lacks ``rows``, or "stored" weights are not
            frozen or have another recipe.
        RuntimeError: a policy without a GPU.
    """
    _check_arguments(model, recipe, weights)
    _checks.flags(norms=norms, routers=routers, heads=heads, small=small, blocks=blocks, dry_run=dry_run)
    table = recipe_table(recipe, "convert", _NONE)
    reshard(model)  # what FSDP2 has gathered looks like a plain weight, and is given back later
    found, found_norms = list(gemm_modules(model)), list(norm_modules(model)) if norms else []
    modules = {one.name: one.module for one in (*found, *found_norms)}
    recipes: dict[str, Recipe | None] = {}
    for pattern, value in table.items():
        names = dict(model.named_modules()) if value is None else modules
        recipes.update(dict.fromkeys(matching_names(pattern, names, model, _KIND, "recipe"), value))
    chosen = _chosen_names(only, modules, model)
    skipped = set() if skip is None else set(selected_names(skip, modules, model, _KIND, "skip"))
    asked = {"routers": routers, "heads": heads, "small": small, "blocks": blocks}
    named = _names_in_full(only, table)
    decisions = [_decide(one, recipes, chosen, skipped, asked, named) for one in found]
    choose = policy_named(policy, rows)
    if choose is not None:
        decisions = [_by_policy(one, choose, rows) for one in decisions]  # type: ignore[arg-type]
    if weights != "plain":
        decisions = _with_stored_weights(model, decisions, weights, chosen - skipped)
    chosen_norms = [_decide_norm(one, chosen, skipped) for one in found_norms]
    # resolves every recipe, so that what cannot be resolved fails here
    receipt = receipt_of(model, decisions, chosen_norms, dry_run)
    if dry_run:
        return receipt
    given = [one for one in decisions if recipes.get(one.found.name)]
    wanted = [one for one in given if one.found.name in chosen - skipped]
    if policy is None and not any(norm.layer for norm in chosen_norms):
        _check_converts(model, wanted or given or decisions, skip)
    _apply(decisions, chosen_norms)
    for module in model.modules():
        unmerge_exactly(module, "base_layer", getattr(module, "base_layer", None))
    renew_with(model)
    return model


def revert(model: Model) -> Model:
    """Undo :func:`convert` for all of a model's modules: restore their classes and attributes.

    Parameters keep their current values; weights that were stored quantized get the values of the quantized copy.
    Recipes and the state of delayed scaling are dropped.

    Returns:
        ``model``.

    Nothing changes if it raises.

    Raises:
        RuntimeError: other code has changed a converted module's class, or a sharded weight is stored or gathered as
            codes.
    """
    _checks.module("model", model)
    converted = {module: name for name, module in model.named_modules() if is_converted(module)}
    reshard(model)
    for module, name in converted.items():
        check_turns_back(name, module)
    sharded = any(is_distributed(parameter) for parameter in model.parameters())
    for record in describe_parameters(model).values() if sharded else ():
        if record.layer in converted and record.mesh is not None and record.stored != "plain":
            how = "stored" if record.stored == "codes" else "gathered by narrowcast.distributed.shard"
            raise RuntimeError(
                f"{shown(record.name)} is {how} as codes and sharded; call narrowcast.revert before sharding, or save "
                "a checkpoint and load it into a model that is not sharded"
            )
    for module in converted:
        restore(module)
        turn_back(module)
    drop_reasons(model)
    return model


def _check_arguments(model: Any, recipe: Any, weights: str) -> None:
    _checks.module("model", model)
    if recipe is None:
        raise TypeError(
            f"recipe is None; pass one of narrowcast.recipe's recipes, a name such as 'current', or a table; {_NONE}"
        )
    check_weights(weights, ("plain", "stored", *DECODED))


def _apply(decisions: list[Decision], norms: list[FoundNorm]) -> None:
    """Apply the decisions, and store their reasons."""
    for one in decisions:
        if one.decision == "converted":
            if one.found.layer is not None:
                become(one.found.module, one.found.layer, one.found.name, one.role_name, one.recipe)
            elif one.recipe != one.found.module.recipe:
                change_recipe(one.found.module, one.role_name, one.recipe)
            if one.stored:
                store(one.found.module, one.stored)
        if one.decision != "narrowcast":
            record_reason(one.found.module, one.reason)
    for norm in norms:
        if norm.layer is not None:
            become(norm.module, norm.layer, norm.name)
        record_norm_reason(norm.module, norm.reason)


def _check_converts(model: nn.Module, wanted: list[Decision], skip: Selectors) -> None:
    """
    Raises:
        ValueError: none of the modules with a recipe is converted.
    """
    if not wanted or any(one.decision == "converted" for one in wanted):
        return
    reasons: dict[str, list[str]] = {}
    for one in wanted:
        reasons.setdefault(one.reason, []).append(one.found.name or "the model")
    told = "; ".join(f"{some(names)}: {reason}" for reason, names in list(reasons.items())[:2])
    if skip == "":
        told += ', whose "" selects all modules'
    # a reason with a remedy has it after a semicolon
    other = "" if all(";" in reason for reason in reasons) else "Give another recipe=, only= or skip=; "
    raise ValueError(
        f"convert would change nothing in this {type(model).__name__}; {told}. {other}dry_run=True lists every reason"
    )


def _chosen_names(only: Selectors, modules: dict[str, nn.Module], model: nn.Module) -> set[str]:
    """Return the names that ``only`` selects.

    Raises:
        ValueError: none.
    """
    chosen = set(modules if only is None else selected_names(only, modules, model, _KIND, "only"))
    if not chosen:
        raise ValueError(
            f"only={shown(only)} chooses none of {len(modules)} modules; its functions are called with (name, "
            f"module), such as {shown(next(iter(modules), ''))} and that module"
        )
    return chosen


def _names_in_full(only: Selectors, table: dict[str, Recipe | None]) -> set[str]:
    """Return the patterns of ``only`` and of the recipes, of which one that is a module's whole name asks for that
    module.
    """
    listed: Any = [only] if isinstance(only, str) else [] if only is None or callable(only) else only
    return {one for one in listed if isinstance(one, str)} | set(table)


def _decide(
    one: Found,
    recipes: dict[str, Recipe | None],
    chosen: set[str],
    skipped: set[str],
    asked: dict[str, bool],
    named: set[str],
) -> Decision:
    before = decision_so_far(one)
    if before.decision == "narrowcast":
        return before
    if before.decision == "converted":
        return _decide_again(before, recipes.get(one.name) if one.name in chosen - skipped else None)
    if one.layer is None:
        return Decision(one, "kept", one.reason, None)
    if one.name in skipped:
        return Decision(one, "kept", "skip", None)
    if one.name not in chosen:
        return Decision(one, "kept", NOT_IN_ONLY, None)
    recipe = recipes.get(one.name)
    if recipe is None:
        return Decision(one, "kept", "no recipe is given for it", None)
    if one.role and not asked[one.role] and one.name not in named:
        return Decision(one, "kept", f"{ROLES[one.role]}; {one.role}=True converts it", None)
    advice = recipe.high_precision_blocks
    if advice and one.place and not asked["blocks"] and one.name not in named and advice.keeps(*one.place):
        reason = "among the first and last blocks, which the recipe's authors keep so"
        return Decision(one, "kept", f"{reason} ({advice.source}); blocks=True converts it", None)
    return Decision(one, "converted", one.note, recipe)


def _decide_again(before: Decision, recipe: Recipe | None) -> Decision:
    """Return the decision for a converted module, with the recipe that it has from now on: None is not to change it.

    Raises:
        ValueError: its weight is stored in the format of another recipe.
    """
    if recipe is None or recipe == before.recipe:
        return before
    if before.stored == "stored":  # a copy that is decoded serves every recipe
        raise ValueError(
            f"the weight of {shown(before.found.name or 'the model')} is stored quantized for "
            f"{recipe_name(before.recipe)}; call narrowcast.revert(model) before converting with another recipe"
        )
    return replace(before, recipe=recipe)


def _by_policy(one: Decision, choose: Policy, rows: int) -> Decision:
    """Return the decision, or keep the module if it is faster in high precision; unmeasured ones are converted."""
    weights = one.found.weights
    if one.decision != "converted" or one.recipe is None or any(weight.groups > 1 for weight in weights):
        return one
    shapes = [(rows, weight.rows, weight.columns) for weight in weights]
    recipe, reason = choose(one.recipe, shapes, weights[0].tensor.dtype)
    if recipe is None:
        return Decision(one.found, "kept", reason, None)
    return replace(one, reason="; ".join(filter(None, (one.reason, reason))))


def _decide_norm(one: FoundNorm, chosen: set[str], skipped: set[str]) -> FoundNorm:
    if one.layer is not None and (one.name in skipped or one.name not in chosen):
        return one._replace(layer=None, reason="skip" if one.name in skipped else NOT_IN_ONLY)
    return one


def _with_stored_weights(
    model: nn.Module, decisions: list[Decision], weights: str, chosen: set[str]
) -> list[Decision]:
    """Return the decisions, with weights of the chosen stored where they can be, and a reason where they cannot.

    Raises:
        ValueError: no weight can be, or one is stored in another way already.
    """
    uses = uses_of_parameters(model)
    found = []
    for one in decisions:
        if one.decision == "converted" and one.found.name in chosen:
            reason = "its weights are not stored quantized"
            if stores(one.found.layer, one.found.module):
                found_reasons = [why_not_stored(weight.tensor, uses) for weight in one.found.weights]
                reason = next(filter(None, found_reasons), "")
            if one.stored and one.stored != weights:
                raise ValueError(
                    f"the weight of {shown(one.found.name or 'the model')} is stored as {shown(one.stored)}, not "
                    f"{shown(weights)}; call narrowcast.revert(model) first, which keeps the values of the copy"
                )
            stored = "" if reason else weights
            one = replace(one, stored=stored, reason="; ".join(filter(None, (one.reason, reason))))
        found.append(one)
    if not any(one.stored for one in found):
        raise nothing_to_store(weights)
    return found
