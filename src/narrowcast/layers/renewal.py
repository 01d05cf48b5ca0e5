"""Renewal of the scales of delayed scaling: after an optimizer's step, and nowhere else.

A backward reads the scales of its forward for the same reason for which it reads the weights of its forward: nothing
writes either until the step. So layers may run in any order and any number of times in a step, and be recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _checks
from .._tracing import refuse_in_graphs
from ..functional.collectives import checked_group, group_size
from ..state import OWNERS, Agreement, reduce_amax, renew, warn_of_no_reduction
from ..upstream.autograd import is_in_backward
from ..upstream.fsdp import sharded_parameters
from ..upstream.modules import own_parameters
from .delayed import DelayedLayer
from .recipe_owner import forget_autocasts

# Model -> name of a group -> what its ranks have compared. No attribute: a copy or a loaded model is compared again.
_AGREED: WeakKeyDictionary[nn.Module, dict[str, Agreement]] = WeakKeyDictionary()

_MODELS: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], int]] = WeakKeyDictionary()
"""Models that were given their recipes, in this order, which is that of all ranks, the groups over which their amaxes
are reduced before each renewal, and a number of those with groups, which is that of all ranks, too."""

_NUMBERS = itertools.count(1)

_STEPPED: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[Any, ...], set[int]]] = WeakKeyDictionary()
"""By groups, the numbers of the models that an optimizer steps on any rank."""

_PARTS: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers of a rank's share of parameters, which another optimizer steps that has all of them."""


def renew_with(model: nn.Module, groups: Sequence[Any] = ()) -> None:
    """Renew the frozen layers of a model with the others, after amaxes were reduced over ``groups``.

    Args:
        groups: none keeps those that were given before.
    """
    before, number = _MODELS.get(model, ((), 0))
    _MODELS[model] = tuple(groups) or before, number or (next(_NUMBERS) if groups else 0)


def renew_delayed_scaling(model: nn.Module) -> nn.Module:
    """Renew the scales of a model's delayed layers from what they have collected; call it after weights have changed.

    Every step of a ``torch.optim.Optimizer`` does this for the layers whose parameters it has. Call it in loops that
    change weights in another way, such as by an optimizer of master weights, or where ``optimizer.step`` is part of a
    graph. Renewing twice is renewing once. Ranks reduce nothing here: see :func:`reduce_delayed_scaling`.

    Returns:
        ``model``.
    Raises:
        RuntimeError: in compiled code.
    """
    refuse_in_graphs("narrowcast.renew_delayed_scaling(model) belongs outside of compiled code")
    _renew(layers_of(model))
    return model


def reduce_delayed_scaling(model: nn.Module, group: Any = None) -> None:
    """Reduce the collected amax of a model's delayed layers over ranks, by MAX; call it before ``optimizer.step()``.

    One all-reduce whose layout follows only from ``model.modules()``: ranks may run different layers, or not have their
    state yet. The first call for a group also compares sizes. Once per step is enough, however many backwards it has.
    Without it scales and histories differ between ranks, and a checkpoint holds those of one rank. A warning says so
    once, on a GPU in a later call. Recipes with ``reduce_amax=False`` take no part. After
    ``set_recipe(..., amax_group=group)`` and ``narrowcast.distributed.shard`` every step does this by itself.

    Args:
        group: process group of the ranks with equal models, or its name; None is the default group.
    Raises:
        TypeError, ValueError: ``model`` is no module, or ``group`` no process group, or one without this rank.
        RuntimeError: the ranks' models have layers of different sizes; raised on all ranks.
    """
    _reduce(model, layers_of(model), checked_group(group, "group"))


def layers_of(model: nn.Module) -> list[DelayedLayer]:
    _checks.module("model", model)
    return [layer for layer in model.modules() if isinstance(layer, DelayedLayer)]


def _reduce(model: nn.Module, layers: list[DelayedLayer], group: Any) -> None:
    states = [state for layer in layers for state in layer.amax_to_reduce()]
    for layer in layers:
        layer._reduced = True
    agreements = _AGREED.setdefault(model, {})
    reduce_amax(states, group, agreements.setdefault(getattr(group, "group_name", ""), Agreement()))


def _renew(owners: Collection[Any], unless: Tensor | None = None) -> None:
    ranks, layers = group_size(None), [owner for owner in owners if isinstance(owner, DelayedLayer)]
    if any(ranks > layer.part_of_experts[1] and layer.lacks_reduction() for layer in layers):
        warn_of_no_reduction()
    renew(owners, unless=unless)
    for layer in layers:
        layer.end_step()
    if not is_in_backward():
        forget_autocasts()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note the optimizer inside of ZeRO's, the pre-hook of all optimizers: each rank's may be of another model."""
    part = getattr(optimizer, "optim", None)
    if isinstance(part, torch.optim.Optimizer) and not torch.compiler.is_compiling():
        _PARTS.add(part)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Renew what follows an optimizer's step, the post-hook of all optimizers."""
    if torch.compiler.is_compiling() or optimizer in _PARTS:
        return  # before PyTorch 2.13 the hook is part of a compiled step, which cannot read what layers keep
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    outside, others = not is_in_backward(), set(OWNERS)
    # inside of a backward others are still to come: what has a gradient was stepped
    stepped = {id(one) for one in parameters if outside or one.grad is not None}
    ids = {model: stepped | _gathered(model, stepped) for model in list(_MODELS)}
    trained = [model for model, here in ids.items() if any(id(one) in here for one in model.parameters())]
    trained = _trained_by_ranks(optimizer, trained) if outside else trained
    renewed: dict[Any, None] = {}  # each once: a layer of several models rolls its history once a step
    for model, here in ids.items():
        layers, groups = layers_of(model), _MODELS[model][0]
        if any(parameter.requires_grad for parameter in model.parameters()):
            others.difference_update(layers)  # else no step is the model's own
        if model in trained:
            # with groups all: ranks may step other parameters, and are to renew the same layers
            whole = outside and groups
            own = layers if whole else [layer for layer in layers if layer.follows(here, outside)]
            for group in groups:
                _reduce(model, own, group)
            renewed |= dict.fromkeys(own)
    renewed |= dict.fromkeys(owner for owner in others if owner.follows(stepped, outside))
    # a fused optimizer's kernel that has found gradients that are not finite has written nothing
    _renew(renewed, getattr(optimizer, "found_inf", None))


def _trained_by_ranks(optimizer: torch.optim.Optimizer, trained: list[nn.Module]) -> list[nn.Module]:
    """Return the models that any rank steps, perhaps others than this one. The first step asks all ranks."""
    known, given = _STEPPED.setdefault(optimizer, {}), [_MODELS[model] for model in trained]
    for groups in dict.fromkeys(groups for groups, _ in given if groups and groups not in known):
        numbers = {number for others, number in given if others == groups}
        for group in groups:
            found = [numbers] * group_size(group)
            if len(found) > 1:
                torch.distributed.all_gather_object(found, numbers, group=group)
            numbers = numbers.union(*found)
        known[groups] = numbers
    return [one for one, (groups, at) in _MODELS.items() if one in trained or at in known.get(groups, ())]


def _gathered(model: nn.Module, stepped: set[int]) -> set[int]:
    """Return the ids of the parameters that FSDP2 has gathered of those that an optimizer has, which are sharded."""
    known = sharded_parameters(model).items()
    return {id(own_parameters(part).get(name)) for (part, name), one in known if id(one) in stepped}


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
