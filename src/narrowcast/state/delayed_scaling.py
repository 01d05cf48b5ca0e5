"""Delayed scaling: the state a layer keeps, and its renewal.

State is plain buffers of the layer that quantizes with it: scales, an amax history, and the amax that the running step
collects. Forwards and backwards read the scales and raise the amax. :mod:`..layers.renewal` renews the scales after the
optimizer's step; nothing else writes them. Renewing twice is renewing once: what collected nothing keeps its scale.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..functional import renew_delayed_scaling
from ..functional.collectives import group_size
from ..recipe import DelayedScaling


class DelayedSlots(NamedTuple):
    """State of the tensors of one layer.

    ``recipe``: what renews it. ``fp8_maxes``: of the elements of the first n // 2 tensors, and of the rest. ``scale``
    (n,), 0 for a tensor of which nothing was seen yet, ``amax_history`` (L, n), row 0 for the step that runs, ``amax``
    (n,), what that step has collected: fp32.
    """

    recipe: DelayedScaling
    fp8_maxes: tuple[float, float]
    scale: Tensor
    amax_history: Tensor
    amax: Tensor


OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""All that may keep state: layers, and ``RecipeState``s. ``delayed_slots`` returns it, and ``follows`` whether an
optimizer's step renews it."""


# "alone": of no reduction; "differ": of scales that differ between ranks; "kept": of no renewal
_SAID: set[str] = set()


@torch.no_grad()
def renew(owners: Iterable[Any], unless: Tensor | None = None) -> None:
    """Renew scales from the amax that was collected, in a few launches for all of a device.

    What collected nothing keeps history and scale. An amax that is infinite or NaN tells nothing either: of a step
    that a ``GradScaler`` skips it would stand in the history for long.

    Args:
        unless: nothing is renewed if this is not 0, and what was collected stays. The host does not wait for it.
    """
    by_device: dict[torch.device, list[DelayedSlots]] = {}
    for owner in owners:
        for slots in owner.delayed_slots():
            if not slots.scale.is_meta:
                by_device.setdefault(slots.scale.device, []).append(slots)
    for device, group in by_device.items():
        amaxes = [slots.amax for slots in group]
        if unless is not None:
            collected, void = torch.cat(amaxes), unless.to(device) != 0
            sizes = [amax.numel() for amax in amaxes]
            torch._foreach_copy_(amaxes, torch.where(void, 0.0, collected).split(sizes))
        fused = [slots for slots in group if not asks_callables(slots.recipe)]
        if fused:
            renew_delayed_scaling(
                [slots.scale for slots in fused],
                [slots.amax_history for slots in fused],
                [slots.amax for slots in fused],
                [largest for slots in fused for largest in slots.fp8_maxes],
                [slots.recipe.margin for slots in fused],
                [slots.recipe.amax_compute_algo for slots in fused],
            )
        for slots in group:
            if asks_callables(slots.recipe):
                _renew_with_callables(slots)
        if unless is not None:
            torch._foreach_copy_(amaxes, torch.where(void, collected, 0.0).split(sizes))


def asks_callables(recipe: DelayedScaling) -> bool:
    """Return whether the user's own functions renew the scales."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def _renew_with_callables(slots: DelayedSlots) -> None:
    """Unlike the fused rule this one rolls unused tensors, too; but not of a state that nothing used."""
    recipe, amax = slots.recipe, slots.amax
    scale, history = reference.delayed.update(
        torch.where(slots.scale == 0.0, 1.0, slots.scale),
        torch.cat([amax[None], slots.amax_history[1:]]),
        fp8_max=reference.delayed.of_halves(amax, *slots.fp8_maxes),
        margin=recipe.margin,
        algo=recipe.amax_compute_algo,
        always_roll=True,
        scale_algo=recipe.scaling_factor_compute_algo,
        recipe=recipe,
    )
    used, seen = amax.any(), (slots.scale != 0.0) | ((amax > 0.0) & (amax < math.inf))
    slots.scale.copy_(torch.where(used & seen, scale, slots.scale))
    slots.amax_history.copy_(torch.where(used, history, slots.amax_history))
    amax.zero_()


def warn_of_no_reduction() -> None:
    """Warn once that ranks renew scales from amaxes of their own."""
    if "alone" not in _SAID:
        _SAID.add("alone")
        warnings.warn(
            "there are several ranks, and each renews the scales of delayed scaling from amaxes of its own, so that "
            "equal models scale differently; call narrowcast.set_recipe(model, recipe, amax_group=group) once, or "
            "narrowcast.reduce_delayed_scaling(model, group) before each step, or use a recipe with reduce_amax=False",
            stacklevel=6,
        )


class Agreement:
    """What the ranks of a group have compared: how many scales they keep, and whether these are equal."""

    def __init__(self) -> None:
        self.count = -1
        self._differ: Tensor | None = None  # in host memory, which the device writes when it gets there

    def compare(self, largest: Tensor, negated: Tensor) -> None:
        """Warn if scales differ between ranks: now on a CPU; on a GPU in a later reduction, without waiting.

        Args:
            largest: of every scale, over ranks. negated: of every scale's negative; both -inf without one.
        """
        differ = (largest + negated > 0).any()
        if differ.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a replay may outlive this
        if self._differ is None:
            self._differ = torch.zeros((), dtype=torch.bool, pin_memory=differ.is_cuda)
        found = bool(self._differ)
        self._differ.copy_(differ, non_blocking=True)
        if (found or self._differ) and "differ" not in _SAID:
            _SAID.add("differ")
            warnings.warn(
                "scales of delayed scaling differ between ranks: a step renewed them from an amax not reduced; "
                "call narrowcast.reduce_delayed_scaling(model, group) before every optimizer.step(), or once "
                "narrowcast.set_recipe(model, recipe, amax_group=group). Scales are equal again once the histories "
                "hold reduced amaxes alone",
                stacklevel=4,
            )


def reduce_amax(
    states: Sequence[tuple[int, DelayedSlots | None]], group: Any = None, agreement: Agreement | None = None
) -> None:
    """Compute MAX over the ranks of ``group`` of what the step has collected, in one all-reduce of a fixed layout.

    The scales travel with it, to be compared: they are equal if all of them came from amaxes that were reduced.

    Args:
        states: how many scales each state has that the model may keep, in an order that follows from its modules alone,
            and the state; None if this rank does not keep it, or keeps it for itself.
        agreement: of earlier calls for this group. While it holds the number of scales, that is not compared again.
    Raises:
        RuntimeError: the ranks' models keep states of different sizes; on all of them.
    """
    agreement, distributed = agreement or Agreement(), torch.distributed
    if group_size(group) == 1:
        return
    device = next((slots.amax.device for _, slots in states if slots is not None), torch.device("cpu"))
    if "nccl" in distributed.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    sizes = [size for size, _ in states]
    if sum(sizes) != agreement.count:
        _check_count(sum(sizes), group)
        agreement.count = sum(sizes)
    if not sum(sizes):
        return
    absent = torch.full((max(sizes),), -math.inf, dtype=torch.float32, device=device)
    amaxes = [absent[:size] if slots is None else slots.amax.to(device) for size, slots in states]
    scales = torch.cat([absent[:size] if slots is None else slots.scale.to(device) for size, slots in states])
    collected = torch.cat([*amaxes, scales, torch.where(scales == -math.inf, scales, -scales)])
    distributed.all_reduce(collected, op=distributed.ReduceOp.MAX, group=group)
    reduced, largest, negated = collected.split(sum(sizes))
    own = [part for part, (_, slots) in zip(reduced.split(sizes), states) if slots is not None]
    if own:  # a maximum, which no backward minds: versions need not count it
        torch._foreach_copy_([slots.amax.data for _, slots in states if slots is not None], own)
    agreement.compare(largest, negated)


def warn_of_no_renewal(name: str) -> None:
    """Warn once that scales stay as they are."""
    if "kept" not in _SAID:
        _SAID.add("kept")
        warnings.warn(
            f"the weight of {name} changes between training forwards, and nothing renews its scales of "
            "delayed scaling, as a step of a torch.optim.Optimizer that has the weight would; call "
            "narrowcast.renew_delayed_scaling(model) after each change",
            stacklevel=6,
        )


def _check_count(count: int, group: Any) -> None:
    """Raise if the ranks' models keep states of different sizes: on all of them, where the reduction would hang."""
    counts = [count] * group_size(group)
    torch.distributed.all_gather_object(counts, count, group=group)
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"this rank's model keeps {count} delayed scales, others keep between {min(counts)} and {max(counts)}; "
            "pass the group of the ranks that hold the same layers"
        )
