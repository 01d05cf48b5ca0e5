"""Delayed-scaling state: scale and amax history of a module, and their update once per step.

The state of every module is registered here. At the outermost ``autocast`` entry all states that ran under the
entered recipe are renewed together: the amax collected since the last entry moves into the history and gives the
scales of the step that starts. A recomputed forward therefore sees the scales of the first one.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..functional import delayed_scaling_update_
from ..recipe import BACKWARD_TENSOR_TYPES, FORWARD_TENSOR_TYPES, DelayedScaling, Recipe

DEFAULT_HISTORY = 1024
_STATES: list[DelayedScalingState] = []
_BUFFERS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


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
        self.history_length = DEFAULT_HISTORY
        forward, backward = len(FORWARD_TENSOR_TYPES), len(BACKWARD_TENSOR_TYPES)
        for direction, count in (("fwd", forward), ("bwd", backward)):
            scale = torch.ones(count, dtype=torch.float32, device=device)
            history = torch.zeros(DEFAULT_HISTORY, count, dtype=torch.float32, device=device)
            self.register_buffer(f"scale_{direction}", scale, persistent=False)
            self.register_buffer(f"amax_history_{direction}", history, persistent=False)
        self.ran_under: Recipe | None = None  # known after an eager forward; a traced one must not write here

    def reset(self) -> None:
        """Scales back to 1, histories to 0."""
        for name in _BUFFERS:
            getattr(self, name).fill_(1.0 if name.startswith("scale") else 0.0)

    def resize_history(self, length: int) -> None:
        """Make room for a longer history; new rows are zero. A shorter one uses the first rows."""
        for name in ("amax_history_fwd", "amax_history_bwd"):
            history = getattr(self, name)
            if history.shape[0] < length:
                grown = history.new_zeros(length, history.shape[1])
                grown[: history.shape[0]] = history
                setattr(self, name, grown)

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedScalingState:
        """Move with the module, but stay fp32: half-precision scales would lose amax values."""
        for name in _BUFFERS:
            moved = fn(getattr(self, name))
            setattr(self, name, moved if moved.dtype == torch.float32 else getattr(self, name).to(moved.device))
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
            saved = tensor[: self.history_length] if name.startswith("amax") else tensor
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
        for name in _BUFFERS:
            saved = state_dict.get(prefix + name)
            if saved is None:
                continue  # a checkpoint of another recipe: the defaults stay
            if name.startswith("amax"):
                self.resize_history(saved.shape[0])
                self.history_length = saved.shape[0]
            target = getattr(self, name)
            if target.shape[1:] != saved.shape[1:]:
                error_msgs.append(f"{prefix + name} has shape {tuple(saved.shape)}, expected {tuple(target.shape)}")
                continue
            with torch.no_grad():
                target.zero_()
                target[: saved.shape[0]].copy_(saved)


def register_delayed_state(owner: nn.Module, state: DelayedScalingState) -> None:
    """Have a module's state updated with all others for as long as the module lives."""
    _STATES.append(state)
    weakref.finalize(owner, _forget, state)


def _forget(state: DelayedScalingState) -> None:
    _STATES[:] = [known for known in _STATES if known is not state]


def update_delayed_states(entered: Recipe, group: Any = None) -> None:
    """Renew the scales of every module from what it collected while ``entered`` was the outermost recipe.

    A module that ran eagerly knows its recipe, also a nested one; one that ran compiled is taken to have run under
    ``entered``. Tensors that collected nothing keep history and scale, so modules that did not run are untouched.

    Args:
        entered: the outermost recipe since the last update.
        group: process group over which the collected amax is reduced (MAX) first; None is the default group.
    """
    groups: list[tuple[DelayedScaling, torch.device, list[DelayedScalingState]]] = []
    for state in _STATES:
        rules, device = _rules_of(state.ran_under or entered, state.name), state.scale_fwd.device
        if rules is None or device.type == "meta":
            continue
        for other, place, states in groups:
            if other == rules and place == device:
                states.append(state)
                break
        else:
            groups.append((rules, device, [state]))
    for rules, _, states in groups:
        _update_states(rules, states, group)


def prepare_custom_recipe(recipe: Recipe) -> None:
    """Have a custom recipe make the quantizers of every known module now, outside of any trace.

    A factory need not know the modules of other models; what it refuses here is left to that module's own forward.
    """
    for name in {state.name for state in _STATES}:
        _rules_of(recipe, name)


def _rules_of(recipe: Recipe, name: str) -> DelayedScaling | None:
    """The delayed scaling behind a recipe's quantizers for a module, if any."""
    with contextlib.suppress(Exception):
        return recipe.linear_handles(name).managed
    return None


def _update_states(recipe: DelayedScaling, states: list[DelayedScalingState], group: Any) -> None:
    length = recipe.amax_history_len
    if not torch.compiler.is_compiling():
        for state in states:
            state.resize_history(length)
            state.history_length = length
    directions = (
        (recipe.fp8_format.max_fwd, [s.scale_fwd for s in states], [s.amax_history_fwd for s in states]),
        (recipe.fp8_format.max_bwd, [s.scale_bwd for s in states], [s.amax_history_bwd for s in states]),
    )
    for fp8_max, scales, histories in directions:
        if recipe.reduce_amax:
            _reduce_collected(histories, group)
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            _update_with_callables(recipe, scales, histories, fp8_max)
        else:
            delayed_scaling_update_(scales, histories, fp8_max, recipe.margin, length, recipe.amax_compute_algo)


def _reduce_collected(histories: list[Tensor], group: Any) -> None:
    """MAX over the ranks of what the step collected; one all-reduce with a layout equal on all ranks."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size(group) == 1:
        return
    collected = torch.cat([history[0] for history in histories])
    distributed.all_reduce(collected, op=distributed.ReduceOp.MAX, group=group)
    widths = [history.shape[1] for history in histories]
    torch._foreach_copy_([history[0] for history in histories], list(collected.split(widths)))


def _update_with_callables(
    recipe: DelayedScaling, scales: list[Tensor], histories: list[Tensor], fp8_max: float
) -> None:
    length = recipe.amax_history_len
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
        scale.copy_(new_scale)
        history[:length].copy_(new_history)


