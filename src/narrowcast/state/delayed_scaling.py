"""Delayed-scaling state: scale and amax history of a module, and their update once per step.

The state of every module is registered here. At the outermost ``autocast`` entry of a training step all states are
renewed together: the amax collected since the last entry moves into the history and gives the scales of the step that
starts. A recomputed forward therefore sees the scales of the first one, and what a checkpoint holds is enough to
continue from it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .. import reference
from ..functional import renew_delayed_scaling
from ..recipe import BACKWARD_TENSOR_TYPES, FORWARD_TENSOR_TYPES, DelayedScaling, Mode, Recipe

DEFAULT_HISTORY = 1024
_BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_RENEWED_BY = frozenset((*_BUFFERS, "ran_under"))


class Slots(NamedTuple):
    """State of one module in one direction.

    ``recipe``: what renews it, None when nothing does yet. ``scale`` (n,), ``amax_history`` (L, n): fp32.
    """

    recipe: DelayedScaling | None
    mode: Mode
    scale: Tensor
    amax_history: Tensor


class _Registered(Protocol):
    def slots(self, entered: Recipe) -> list[Slots]:
        """What to renew when ``entered`` becomes the outermost recipe."""
        ...


_STATES: list[_Registered] = []
_OWNERS: dict[int, int] = {}  # id of a state -> how many objects keep it in _STATES


def delayed_slots(
    tensors: int, history_length: int, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Fresh (scale (n,), amax_history (L, n)): scales 1, no amax."""
    scale = torch.ones(tensors, dtype=torch.float32, device=device)
    return scale, torch.zeros(history_length, tensors, dtype=torch.float32, device=device)


class DelayedScalingState(nn.Module):
    """Scale and amax history of one module, forward and backward.

    Buffers: ``scale_fwd`` (3,) and ``amax_history_fwd`` (L, 3) for input, weight and output; ``scale_bwd`` (2,) and
    ``amax_history_bwd`` (L, 2) for grad_output and grad_input. Row 0 of a history collects the current step, row 1 is
    the oldest past step. They enter the state dict only once delayed scaling has run.
    """

    scale_fwd: Tensor
    amax_history_fwd: Tensor
    scale_bwd: Tensor
    amax_history_bwd: Tensor

    def __init__(self, name: str = "", device: torch.device | str | None = None) -> None:
        super().__init__()
        self.name = name
        self.history_lengths = [DEFAULT_HISTORY, DEFAULT_HISTORY]  # rows in use, forward and backward
        for direction, kinds in (("fwd", FORWARD_TENSOR_TYPES), ("bwd", BACKWARD_TENSOR_TYPES)):
            scale, history = delayed_slots(len(kinds), DEFAULT_HISTORY, device)
            self.register_buffer(f"scale_{direction}", scale, persistent=False)
            self.register_buffer(f"amax_history_{direction}", history, persistent=False)
        self.ran_under: Recipe | None = None  # known after an eager forward; a traced one must not write here

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _RENEWED_BY and not torch.compiler.is_compiling():
            _changed()

    def note(self, recipe: Recipe, uses_state: bool) -> None:
        """Remember the recipe of an eager forward; ``uses_state``: it scales something of this module with delay."""
        known = self.ran_under
        if (uses_state or known is not None) and known is not recipe and known != recipe:
            self.ran_under = recipe

    def slots(self, entered: Recipe) -> list[Slots]:
        """Both directions, renewed as the recipe of the last eager forward says, else as the entered one says.

        Raises:
            RuntimeError: in traced code, a history longer than the buffers; tracing cannot replace them.
        """
        forward, backward = _delayed_by(self.ran_under or entered, self.name)
        self._fit_history(0, "amax_history_fwd", forward)
        self._fit_history(1, "amax_history_bwd", backward)
        return [
            Slots(forward, "forward", self.scale_fwd, self.amax_history_fwd),
            Slots(backward, "backward", self.scale_bwd, self.amax_history_bwd),
        ]

    def reset(self) -> None:
        """Scales back to 1, histories to 0, and no recipe known."""
        for name in _BUFFERS:
            getattr(self, name).fill_(1.0 if name.startswith("scale") else 0.0)
        self.ran_under = None

    def _fit_history(self, index: int, name: str, recipe: DelayedScaling | None) -> None:
        """Use as many rows as the recipe says: a shorter history keeps the first ones, a longer one gets zero rows."""
        if recipe is None:
            return
        length = recipe.amax_history_len
        if not torch.compiler.is_compiling():
            if length != self.history_lengths[index]:
                self._resize_history(name, length)
                self.history_lengths[index] = length
        elif length > getattr(self, name).shape[0]:
            raise RuntimeError(
                f"amax_history_len={length} is longer than the {DEFAULT_HISTORY} rows of a new module; run one step "
                "uncompiled, or enter autocast outside of the compiled function"
            )

    def _resize_history(self, name: str, length: int) -> None:
        history = getattr(self, name)
        if history.shape[0] < length:
            grown = history.new_zeros(length, history.shape[1])
            grown[: history.shape[0]] = history
            setattr(self, name, grown)
        else:
            history[length:].zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedScalingState:
        """Move with the module, but stay fp32: half-precision scales would lose amax values."""
        for name in _BUFFERS:
            moved = fn(getattr(self, name))
            setattr(
                self, name, moved if moved.dtype == torch.float32 else getattr(self, name).to(moved.device)
            )
        return self

    def _was_used(self) -> bool:
        if self.scale_fwd.is_meta:
            return False
        scales = (self.scale_fwd != 1).any() | (self.scale_bwd != 1).any()
        return bool(scales | self.amax_history_fwd.any() | self.amax_history_bwd.any())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self._was_used():
            return
        for name in _BUFFERS:
            tensor = getattr(self, name)
            saved = (
                tensor[: self.history_lengths[name.endswith("bwd")]] if name.startswith("amax") else tensor
            )
            destination[prefix + name] = saved if keep_vars else saved.detach().clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = {name: state_dict[prefix + name] for name in _BUFFERS if prefix + name in state_dict}
        if not saved:
            return  # a checkpoint of another recipe, or of other modules
        for name, tensor in saved.items():
            ours = getattr(self, name)
            fits = (
                tensor.shape[1:] == ours.shape[1:] if name.startswith("amax") else tensor.shape == ours.shape
            )
            if not fits or tensor.dim() != ours.dim():
                error_msgs.append(
                    f"{prefix + name} has shape {tuple(tensor.shape)}, expected {tuple(ours.shape)}"
                )
                return
        if self.scale_fwd.is_meta and local_metadata.get("assign_to_params_buffers"):
            self.to_empty(device=next(iter(saved.values())).device)
        self.reset()
        for name, tensor in saved.items():
            if name.startswith("amax"):
                self.history_lengths[name.endswith("bwd")] = tensor.shape[0]
                self._resize_history(name, tensor.shape[0])
            with torch.no_grad():
                getattr(self, name)[: tensor.shape[0]].copy_(tensor)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and deep copies, without the recipe: it may hold functions that do not pickle."""
        return {**self.__dict__, "ran_under": None, "history_lengths": list(self.history_lengths)}


class DelayedBuffers:
    """State of one direction that belongs to no module: what a recipe state's quantizers are views of.

    ``scale`` (n,) and ``amax_history`` (L, n), fp32, are renewed with all others, as ``recipe`` says.
    """

    def __init__(
        self, recipe: DelayedScaling, mode: Mode, tensors: int, device: torch.device | str | None
    ) -> None:
        self.recipe = recipe
        self.mode: Mode = mode
        self.scale, self.amax_history = delayed_slots(tensors, recipe.amax_history_len, device)

    def slots(self, entered: Recipe) -> list[Slots]:
        """The one direction."""
        return [Slots(self.recipe, self.mode, self.scale, self.amax_history)]


def register_delayed_state(owner: object, state: _Registered) -> weakref.finalize:
    """Have a state updated with all others for as long as its owner lives; of several owners, the last one.

    Returns:
        what ends it when the owner dies, or before when called.
    """
    _drop_dead_states()
    owners = _OWNERS.get(id(state), 0)
    _OWNERS[id(state)] = owners + 1
    if owners == 0:
        _STATES.append(state)
        _changed()
    return weakref.finalize(owner, _release, state)


def _release(state: _Registered) -> None:
    # the list stays as it is: an owner may die while the compiler traces over it and writes guards on its entries
    _OWNERS[id(state)] -= 1
    _changed()


def _drop_dead_states() -> None:
    if all(_OWNERS.values()):
        return
    _STATES[:] = [state for state in _STATES if _OWNERS[id(state)]]
    for key in [key for key, owners in _OWNERS.items() if not owners]:
        del _OWNERS[key]


def prepare_custom_recipe(recipe: Recipe) -> None:
    """Have a custom recipe make the quantizers of every known module now, outside of any trace.

    A factory need not know the modules of other models; what it refuses here is left to that module's own forward.
    """
    _drop_dead_states()
    for state in _STATES:
        if isinstance(state, DelayedScalingState):
            _delayed_by(recipe, state.name)


def _delayed_by(recipe: Recipe, name: str) -> tuple[DelayedScaling | None, DelayedScaling | None]:
    """What renews the forward and the backward state of a module under a recipe; None without any delayed quantizer."""
    with contextlib.suppress(Exception):
        handles = recipe.linear_handles(name)
        return handles.forward_state, handles.backward_state
    return None, None


def update_delayed_states(entered: Recipe, group: Any = None) -> None:
    """Renew all scales from the amax that was collected since the last update.

    A module that ran eagerly knows its recipe, also a nested one; one that ran compiled is taken to have run under
    ``entered``. Tensors that collected nothing keep history and scale, so modules that did not run are untouched.

    Args:
        entered: the outermost recipe that is being entered.
        group: process group over which the collected amax is reduced (MAX) first; None is the default group.
    Raises:
        RuntimeError: in traced code, a recipe with more than 1024 rows of history, on a module that never ran.
    """
    if torch.compiler.is_compiling():
        if not (entered.delayed() or entered.custom()):
            return  # traced modules do not know another recipe, so there is nothing to find
        slots = _all_slots(entered)
        batches = _batches_of(slots)
        updates = [batch.update for batch in batches]
    else:
        slots, batches, updates = _remembered(entered)
    if any(batch.recipe.reduce_amax for batch in batches):
        _reduce_collected(slots, group)
    for update in updates:
        update()


class _Batch(NamedTuple):
    """States that one launch renews."""

    recipe: DelayedScaling
    fp8_max: float
    scales: list[Tensor]
    histories: list[Tensor]

    def update(self) -> None:
        """One step of all of them."""
        if self._asks_callables():
            _update_with_callables(self.recipe, self.scales, self.histories, self.fp8_max)
        else:
            rows = [history[: self.recipe.amax_history_len] for history in self.histories]
            collected = [history[0] for history in rows]
            algorithm: Any = self.recipe.amax_compute_algo
            renew_delayed_scaling(self.scales, rows, collected, self.fp8_max, self.recipe.margin, algorithm)

    def _asks_callables(self) -> bool:
        recipe = self.recipe
        return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


class _Remembered(NamedTuple):
    """What entering a recipe renews, valid for one generation of the states."""

    generation: int
    entered: Recipe
    slots: list[Slots]
    batches: list[_Batch]
    updates: list[Callable[[], None]]


_generation = 0  # counts changes of which states there are, where their tensors lie and under what they ran
_last: _Remembered | None = None


def delayed_generation() -> int:
    """A number that grows whenever the state of any module is made, moved, dropped or used under another recipe."""
    return _generation


def _changed() -> None:
    global _generation
    _generation += 1


def _remembered(entered: Recipe) -> tuple[list[Slots], list[_Batch], list[Callable[[], None]]]:
    global _last
    last = _last
    same = last is not None and last.generation == _generation
    if last is None or not same or not (last.entered is entered or last.entered == entered):
        _drop_dead_states()
        slots = _all_slots(entered)  # may count a change: a history that had to be resized
        batches = _batches_of(slots)
        updates = [batch.update for batch in batches]
        last = _last = _Remembered(_generation, entered, slots, batches, updates)
    return last.slots, last.batches, last.updates


def _all_slots(entered: Recipe) -> list[Slots]:
    return [one for state in _STATES for one in state.slots(entered) if not one.scale.is_meta]


def _batches_of(slots: list[Slots]) -> list[_Batch]:
    groups: list[list[Slots]] = []
    for one in slots:
        known = next((group for group in groups if _renewed_alike(group[0], one)), None)
        if known is not None:
            known.append(one)
        elif one.recipe is not None:
            groups.append([one])
    return [_batch(group) for group in groups]


def _batch(group: list[Slots]) -> _Batch:
    recipe, mode = group[0].recipe, group[0].mode
    assert recipe is not None
    fp8_max = recipe.fp8_format.max_fwd if mode == "forward" else recipe.fp8_format.max_bwd
    return _Batch(recipe, fp8_max, [one.scale for one in group], [one.amax_history for one in group])


def _renewed_alike(one: Slots, other: Slots) -> bool:
    same_recipe = one.recipe is other.recipe or one.recipe == other.recipe
    return same_recipe and one.mode == other.mode and one.scale.device == other.scale.device


def _reduce_collected(slots: list[Slots], group: Any) -> None:
    """MAX over the ranks of what the step collected: one all-reduce over all states, so that ranks whose modules
    did not all run still agree on its layout."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size(group) == 1:
        return
    rows = [one.amax_history[0] for one in slots]
    collected = torch.cat([row.to(rows[0].device) for row in rows])
    distributed.all_reduce(collected, op=distributed.ReduceOp.MAX, group=group)
    for one, row, reduced in zip(slots, rows, collected.split([row.shape[0] for row in rows])):
        if one.recipe is None or one.recipe.reduce_amax:
            row.copy_(reduced)


def _update_with_callables(
    recipe: DelayedScaling, scales: list[Tensor], histories: list[Tensor], fp8_max: float
) -> None:
    """Unlike the fused rule this one rolls unused tensors, too; but not in a step in which no tensor was used."""
    length = recipe.amax_history_len
    ran = torch.cat([history[0] for history in histories]).any()
    for scale, history in zip(scales, histories, strict=True):
        new_scale, new_history = reference.delayed.update_always_roll(
            scale,
            history[:length],
            fp8_max=fp8_max,
            margin=recipe.margin,
            algo=recipe.amax_compute_algo,
            scale_algo=recipe.scaling_factor_compute_algo,
            recipe=recipe,
        )
        scale.copy_(torch.where(ran, new_scale, scale))
        history[:length].copy_(torch.where(ran, new_history, history[:length]))
