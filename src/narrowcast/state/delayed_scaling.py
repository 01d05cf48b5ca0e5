"""Delayed scaling: the state a layer keeps, and its renewal once per step.

State is plain buffers of the layer that quantizes with it: scales, an amax history, and the amax that the running step
collects. There is no list of it anywhere else. It is renewed by the model that was given the recipe
(:func:`narrowcast.set_recipe`), in its forward pre-hook; by a layer itself that was given one; and with ``autocast``
alone by the outermost entry, for what ran under it in this thread. Renewing twice is renewing once: what collected
nothing keeps its scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import reference
from .._tracing import PLAIN
from ..functional import read_scales, renew_delayed_scaling, renewed_scales, scales_of_run, take_amaxes
from ..functional.collectives import group_name, group_size
from ..functional.recomputation import put_back
from ..recipe import BACKWARD_TENSOR_TYPES, FORWARD_TENSOR_TYPES, DelayedScaling, Mode
from ..upstream.autograd import version_preserved


class DelayedSlots(NamedTuple):
    """State of one layer in one direction.

    ``recipe``: what renews it. ``scale`` (n,), 0 for a tensor of which nothing was seen yet, ``amax_history`` (L, n),
    row 0 for the step that runs, ``amax`` (n,), what that step has collected: fp32. ``shared``: codes of several ranks
    are joined, so that ranks cannot take the scale of their own tensors; nor can batches, in the batch-invariant mode.
    """

    recipe: DelayedScaling
    mode: Mode
    scale: Tensor
    amax_history: Tensor
    amax: Tensor
    shared: bool = False

    @property
    def fp8_max(self) -> float:
        """Largest value of the elements."""
        return fp8_max(self.recipe, self.mode)

    @property
    def unseen(self) -> float:
        """What a forward reads instead of a scale of 0: a constant, or minus what its tensor's amax is mapped to."""
        if self.shared:
            return first_scale(self.recipe, self.mode)
        return -self.fp8_max / 2**self.recipe.margin

    def of_first_operand(self) -> tuple[Tensor, Tensor]:
        """Return the scale and amax of its input, or of its grad_output."""
        kinds = len(FORWARD_TENSOR_TYPES if self.mode == "forward" else BACKWARD_TENSOR_TYPES)
        count = self.scale.numel() // kinds
        return self.scale[:count], self.amax[:count]


class DelayedState(Protocol):
    """A layer, or another object, that keeps state of delayed scaling.

    One whose ``_starts`` is true has first scales, which :func:`warn_of_saturation` has not looked at. It has
    ``_has_trained``, too, whether a training forward has begun, and ``_states_by_stage()``.
    """

    def delayed_slots(self) -> list[DelayedSlots]:
        """Return its state, by direction."""
        ...


def has_begun(states: Sequence[DelayedSlots], renewed: bool = False) -> Tensor:
    """Return whether a stage has its states of a pass, as a tensor; ``renewed``: only of what a renewal has found.

    The amaxes of inputs and gradients tell: an optimizer that writes codes has those of weights before. Zeros show
    nothing, nor does a pass without rows.
    """
    of_first = [slots.of_first_operand() for slots in states]
    return torch.cat(
        [one for scale, amax in of_first for one in ((scale,) if renewed else (scale, amax))]
    ).any()


# "reduced": the user did, at least once; "warned": of no reduction; "saturated": of a first step; "differ": of scales
# that differ between ranks
_SAID: set[str] = set()


def fp8_max(recipe: DelayedScaling, mode: Mode) -> float:
    """Return the largest value of the elements of a direction."""
    return recipe.fp8_format.max_fwd if mode == "forward" else recipe.fp8_format.max_bwd


# What a first step with joined codes may bring: activations up to 28, gradients up to 7/8. With the range of the
# formats below that, E4M3 keeps activations down to 1e-4 and E5M2 gradients down to 2e-10, where a scale of 1 loses
# gradients below 1e-5.
_FIRST_AMAX: dict[Mode, float] = {"forward": 28.0, "backward": 0.875}


def first_scale(recipe: DelayedScaling, mode: Mode) -> float:
    """Scale that ranks which join codes have before anything was seen; that of a weight follows from the weight."""
    if recipe.initial_scale == "one":
        return 1.0
    return fp8_max(recipe, mode) / 2**recipe.margin / _FIRST_AMAX[mode]


def renew(owners: Iterable[DelayedState]) -> None:
    """Renew scales from the amax that was collected, in a few launches for all of a device.

    What collected nothing keeps history and scale.
    """
    groups: dict[tuple[Any, ...], list[DelayedSlots]] = {}
    for owner in owners:
        for slots in owner.delayed_slots():
            if not slots.scale.is_meta:
                key: tuple[Any, ...] = (slots.scale.device,)
                if asks_callables(slots.recipe):
                    key += (slots.recipe, slots.mode, slots.amax_history.shape[0])
                groups.setdefault(key, []).append(slots)
    for key, group in groups.items():
        if len(key) > 1:
            _renew_with_callables(group)
        else:
            renew_delayed_scaling(*_states_and_rules(group))


def warn_of_saturation(owners: Iterable[DelayedState]) -> None:
    """Warn once, before a renewal, if a first step has brought more than its first scales hold.

    The host waits for the device, once in the life of a layer. Only eager code asks: a graph has no host to warn.
    """
    states = _end_of_first_steps(
        [
            owner
            for owner in owners
            if getattr(owner, "_starts", False) and getattr(owner, "_has_trained", False)
        ]
    )
    if not states:
        return
    device = states[0].scale.device
    # a scale of 0 was a constant if it is shared; any other was right
    shares = [slots.amax * (slots.scale == 0) * (slots.unseen / slots.fp8_max) for slots in states]
    share = torch.cat([one.to(device) for one in shares])
    beyond = share[share.isfinite() & (share > _ROUNDED)]
    if beyond.numel() and "saturated" not in _SAID:
        _SAID.add("saturated")
        warnings.warn(
            f"the first step under delayed scaling saturated {beyond.numel()} tensors, the largest at "
            f"{float(beyond.max()):.3g} times what its first scale holds: that step's gradients were too small. Scales "
            "have followed since. To begin with right ones, call narrowcast.calibrate_delayed_scaling(model, step), "
            "whose step runs forward and backward of a batch, before training",
            stacklevel=5,
        )


def _end_of_first_steps(owners: list[Any]) -> list[DelayedSlots]:
    """Note which layers have begun in all their stages, and return their states.

    The first scales of the others still follow their weights.
    """
    stages = [
        [states for states in owner._states_by_stage() if is_readable(states[0].scale)] for owner in owners
    ]
    known = [(owner, of_owner) for owner, of_owner in zip(owners, stages) if of_owner]
    if not known:
        return []
    all_slots = [slots for _, of_owner in known for states in of_owner for slots in states]
    # what a graph without gradients has collected does not count
    put_back([slots.amax for slots in all_slots])
    device, found = all_slots[0].scale.device, []
    begun = [torch.stack([has_begun(states) for states in of_owner]).all() for _, of_owner in known]
    for (owner, of_owner), ends in zip(known, torch.stack([one.to(device) for one in begun]).tolist()):
        if ends:
            owner.__dict__["_starts"] = False
            found += [slots for states in of_owner for slots in states]
    return found


def is_readable(scale: Tensor) -> bool:
    """Return whether the host may wait for a value now."""
    if type(scale) not in PLAIN or scale.is_meta:  # fake tensors have none
        return False
    return not scale.is_cuda or not (
        torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode()
    )


# A weight's scale maps its amax to the largest value of the format, up to rounding.
_ROUNDED = 1.001


def renew_and_read(states: list[DelayedSlots]) -> list[Tensor]:
    """Return copies of one layer's scales, renewed first; inside a backward, which recomputes, just the copies."""
    if any(asks_callables(state.recipe) for state in states):
        for state in states:
            _renew_with_callables([state])
        return scales_of(states)
    unseen = [state.unseen for state in states]
    return renewed_scales(*_states_and_rules(states), unseen)  # type: ignore[no-any-return]


def scales_of(states: list[DelayedSlots]) -> list[Tensor]:
    """Return copies of one layer's scales."""
    return read_scales([state.scale for state in states], [state.unseen for state in states])  # type: ignore[no-any-return]


def scales_of_traced(states: list[DelayedSlots], renews: bool, recorded: bool, root: str) -> list[Tensor]:
    """Return the scales that a traced forward in training reads: :data:`..functional.scales_of_run`."""
    if renews and any(asks_callables(state.recipe) for state in states):
        for state in states:
            _renew_with_callables([state], root)
        renews = False
    unseen, collects = [state.unseen for state in states], [state.mode == "forward" for state in states]
    if renews:
        of_states = _states_and_rules(states)
    else:
        of_states = [state.scale for state in states], [], [state.amax for state in states], [], [], []
    return scales_of_run(*of_states, unseen, collects, recorded, root, 0)  # type: ignore[no-any-return]


def _states_and_rules(group: list[DelayedSlots]) -> tuple[list[Any], ...]:
    """Return the renewal operators' arguments of each state."""
    return (
        [slots.scale for slots in group],
        [slots.amax_history for slots in group],
        [slots.amax for slots in group],
        [slots.fp8_max for slots in group],
        [slots.recipe.margin for slots in group],
        [slots.recipe.amax_compute_algo for slots in group],
    )


def asks_callables(recipe: DelayedScaling) -> bool:
    """Return whether the user's own functions renew the scales."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def _renew_with_callables(group: Sequence[DelayedSlots], root: str = "") -> None:
    """Unlike the fused rule this one rolls unused tensors, too; but not in a step in which no tensor was used."""
    recipe, amaxes = group[0].recipe, take_amaxes([slots.amax for slots in group], root)
    used = torch.cat(amaxes).any()
    for slots, amax in zip(group, amaxes):
        collected = torch.cat([amax[None], slots.amax_history[1:]])
        seen = (slots.scale != 0.0) | ((amax > 0.0) & (amax < math.inf))
        scale, history = reference.delayed.update_always_roll(
            torch.where(slots.scale == 0.0, 1.0, slots.scale),
            collected,
            fp8_max=slots.fp8_max,
            margin=recipe.margin,
            algo=recipe.amax_compute_algo,
            scale_algo=recipe.scaling_factor_compute_algo,
            recipe=recipe,
        )
        slots.scale.copy_(torch.where(used & seen, scale, slots.scale))
        slots.amax_history.copy_(torch.where(used, history, slots.amax_history))


def warn_unless_reduced(group: Any) -> None:
    """Warn once if a step has passed and nothing was ever reduced over the ranks of an autocast's group."""
    if _SAID - {"saturated"} or not (isinstance(group, str) or hasattr(group, "group_name")):
        return
    if group_size(group_name(group)) > 1:
        _SAID.add("warned")
        warnings.warn(
            "autocast got an amax_reduction_group, and over it nothing was reduced: ranks scale differently; call "
            "narrowcast.reduce_delayed_scaling(model, group) after every backward, "
            "or use a recipe with reduce_amax=False",
            stacklevel=4,
        )


class Reduced(NamedTuple):
    """What a rank brings of one state to a reduction.

    ``size``: how many scales it has. ``amax``, ``scale``: its tensors, fp32 (size,); None if this rank does not keep
    it, or keeps it for itself.
    """

    size: int
    amax: Tensor | None
    scale: Tensor | None


class Agreement:
    """What the ranks of a group have compared: how many scales they keep, and whether these are equal."""

    def __init__(self) -> None:
        self.count = -1
        self._differ: Tensor | None = None  # in host memory, once the device has passed the event
        self._written: Any = None

    def compare(self, largest: Tensor, negated: Tensor) -> None:
        """Warn if scales differ between ranks: now on a CPU; on a GPU in a later reduction, without waiting.

        Args:
            largest: of every scale, over ranks. negated: of every scale's negative; both -inf without one.
        """
        self._warn_if_known()
        if self._differ is not None or (largest.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        differ = (largest + negated > 0).any()
        if differ.is_cuda:
            self._differ = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differ, non_blocking=True)
            self._written = torch.cuda.Event()
            self._written.record()
        else:
            self._differ = differ
            self._warn_if_known()

    def _warn_if_known(self) -> None:
        if self._differ is None or (self._written is not None and not self._written.query()):
            return
        differ, self._differ, self._written = bool(self._differ), None, None
        if differ and "differ" not in _SAID:
            _SAID.add("differ")
            warnings.warn(
                "scales of delayed scaling differ between ranks: a training forward renewed them from an amax that was "
                "not reduced; call narrowcast.reduce_delayed_scaling(model, group) after every backward, with "
                "accumulated gradients once per microbatch, and narrowcast.set_recipe(model, recipe) if not every rank "
                "runs every layer. Scales are equal again once the histories hold reduced amaxes alone",
                stacklevel=5,
            )


def reduce_amax(states: Sequence[Reduced], group: Any = None, agreement: Agreement | None = None) -> None:
    """Compute MAX over the ranks of ``group`` of what the step has collected, in one all-reduce of a fixed layout.

    The scales travel with it, to be compared: they are equal if all of them came from amaxes that were reduced.

    Args:
        states: every state that the model may keep, in an order that follows from its modules alone.
        agreement: of earlier calls for this group. While it holds the number of scales, that is not compared again.
    Raises:
        RuntimeError: the ranks' models keep states of different sizes; on all of them.
    """
    _SAID.add("reduced")
    agreement, distributed = agreement or Agreement(), torch.distributed
    if not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1
    ):
        return
    kept = [
        (state.amax, state.scale) for state in states if state.amax is not None and state.scale is not None
    ]
    put_back([amax for amax, _ in kept])
    device = next((amax.device for amax, _ in kept), torch.device("cpu"))
    if "nccl" in distributed.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    sizes = [state.size for state in states]
    if sum(sizes) != agreement.count:
        _check_count(sum(sizes), device, group)
        agreement.count = sum(sizes)
    if not sum(sizes):
        return
    negated = iter(torch._foreach_neg([scale for _, scale in kept]) if kept else ())
    brought = (
        ([state.amax for state in states], 0.0),
        ([state.scale for state in states], -math.inf),
        ([None if state.scale is None else next(negated) for state in states], -math.inf),
    )
    collected = torch.cat(
        [
            torch.full((size,), absent, device=device) if one is None else one.to(device)
            for tensors, absent in brought
            for size, one in zip(sizes, tensors)
        ]
    )
    distributed.all_reduce(collected, op=distributed.ReduceOp.MAX, group=group)
    reduced, largest, of_negated = collected.split(sum(sizes))
    own = [part for part, state in zip(reduced.split(sizes), states) if state.amax is not None]
    amaxes = [amax for amax, _ in kept]
    with version_preserved(amaxes):
        if amaxes:
            torch._foreach_copy_(amaxes, own)
    agreement.compare(largest, of_negated)


def _check_count(count: int, device: torch.device, group: Any) -> None:
    """Raise if the ranks' models keep states of different sizes: on all of them, where the reduction would hang."""
    extent = torch.tensor([count, -count], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(extent, op=torch.distributed.ReduceOp.MAX, group=group)
    most, fewest = (int(value) for value in extent.tolist())
    if most != -fewest:
        raise RuntimeError(
            f"this rank's model keeps {count} delayed scales, others keep between {-fewest} and {most}; pass the "
            "group of the ranks that hold the same layers"
        )
