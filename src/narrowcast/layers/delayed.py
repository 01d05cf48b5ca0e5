"""Delayed scaling's state as plain buffers of the layer that quantizes with it.

A tensor is cast with a scale that follows from the amax of earlier steps, so that one pass over it is enough. What
has to be kept is small: for each operand a scale, a history of amax, and the amax that the running step collects. It
is kept in buffers, because copies, devices, state dicts and ``_buffers`` swaps then treat it as any layer's. Buffers
exist from the moment at which a recipe says so: ``_keep_state`` makes them, while tracing, too.

A forward reads the scales of its input and raises their amax; its backward does the same with those of gradients. The
optimizer's step renews them (:mod:`.renewal`), and nothing else writes them. A weight has the scale of its own amax.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Set
from functools import partial
from typing import Any

import torch

from .._tracing import traced_local, while_tracing
from ..autograd import DelayedScales
from ..recipe import DelayedScaling, Format, LinearPlan, Recipe, linear_plan
from ..state import OWNERS, DelayedSlots, asks_callables, warn_of_no_renewal
from ..upstream.autograd import at_end_of_backward, graph_task_id, is_in_backward
from ..upstream.fsdp import is_managed
from ..upstream.modules import keep_values, own_buffers, own_parameters
from ..upstream.tensors import version_of
from .extra_state import delayed_state, join_directions, state_names, take_extra_state, wrong_value
from .parameters import named_layer
from .recipe_owner import RecipeOwner
from .replicas import PENDING, leave_state_to_ranks

LOOK_EVERY = 32
"""Training forwards between two looks at whether parameters change and nothing renews the scales."""


class DelayedLayer(RecipeOwner):
    """Base of layers that may scale with delay.

    State of a stage, a linear layer inside, is three buffers: ``scale`` (4,), ``amax_history`` (L, 4) and ``amax``
    (4,) of input, output, grad_output and grad_input; fp32, under the stage's prefix. They are None until the layer is
    to run under delayed scaling, and in the state dict from then on. A scale of 0 means that nothing was seen: the
    tensor is then cast with the scale of its own amax. Nothing is kept of weights, which always are.
    """

    codes_are_written: bool = False
    """An optimizer writes the quantized weights of this layer; see ``layers/written_weights.py``."""
    _stage_names: dict[str, str]
    _delayed: dict[str, DelayedScaling | None]  # what renews a stage
    _formats: dict[str, Format]  # for which a stage's scales were made, as far as that is known
    _groups: int = 1  # slots of each tensor type
    part_of_experts: tuple[int, int] = (0, 1)  # its number, and how many parts ranks hold
    _module_type: str = "linear"  # in quantizer roles
    _reduced: bool = False  # ranks have agreed on its amax at least once
    _forwards: int = 0  # in training and eager code
    _lent_in: int = -1  # the backward whose traces have other rules until it ends
    _versions: tuple[int, Set[int]] = (-1, frozenset())  # of scales, and of parameters under these
    _parallel: Any = None  # how the layer is split over ranks that join codes; None if it is not

    def _init_delayed(self, stage_names: dict[str, str]) -> None:
        """
        Args:
            stage_names: prefix of the buffers -> name in quantizer roles, of each stage.
        """
        self._stage_names, self._delayed, self._formats = stage_names, {}, {}
        OWNERS.add(self)
        for name in self._state_names():
            self.register_buffer(name, None)

    # -- what the state is -------------------------------------------------------------------------------------------

    def _prepare_for_recipe(self) -> None:
        if self._recipe is not None:
            self._delayed = {}
            self._keep_state_of(self._recipe)

    def _keep_state_of(self, recipe: Recipe) -> None:
        for prefix, name in self._stage_names.items():
            plan = linear_plan(recipe, name, True, True, module_type=self._module_type)
            self._keep_state(prefix, plan.delayed)

    def _keep_state(self, prefix: str, delayed: DelayedScaling | None, recomputed: bool = False) -> None:
        """Create the buffers that a rule needs, with its history length; existing ones stay."""
        known = self._delayed.get(prefix)
        if delayed is None or delayed == known:
            return
        if known is not None and (recomputed or not self.training):
            return  # an evaluation changes no rule; the step follows that of the forwards
        self._fit_buffers(prefix, delayed)
        # a copy: of an object that a graph has read elsewhere, too, PyTorch 2.11 guards the fields there alone
        self._delayed[prefix] = copy.copy(delayed)

    @torch.inference_mode(False)  # a layer may see inference first and then be trained
    @torch.no_grad()
    def _fit_buffers(self, prefix: str, delayed: DelayedScaling) -> None:
        names = state_names(prefix)
        length, slots, history = delayed.amax_history_len, 4 * self._groups, getattr(self, names[1])
        if history is None:
            device = self._state_device(prefix)
            for name, shape in zip(names, ((slots,), (length, slots), (slots,))):
                setattr(self, name, torch.zeros(shape, dtype=torch.float32, device=device))
        elif history.shape[0] != length:
            # a shorter history keeps the first rows, a longer one gets rows of zeros
            fitted = history.new_zeros(length, history.shape[1])
            kept = min(length, history.shape[0])
            fitted[:kept] = history[:kept]
            setattr(self, names[1], fitted)
        scale, known = getattr(self, names[0]), self._formats.get(prefix)
        if known not in (None, delayed.fp8_format):  # in a new tensor: a backward may still read the old one
            setattr(self, names[0], torch.zeros_like(scale))
        self._formats[prefix] = delayed.fp8_format

    def _keep_states(self, prefixes: tuple[str, ...], plans: tuple[LinearPlan, ...]) -> bool:
        """Call :meth:`_keep_state` for all stages of a forward, and return whether that is traced."""
        if while_tracing(_keep_states_while_tracing):
            for prefix, plan in zip(prefixes, plans):
                if plan.delayed is not None:
                    # read to be guarded: a layer that a graph fits, too, is traced once more, and so gets the rule
                    known = self._delayed[prefix] == plan.delayed
                    if self.training and not known:
                        raise RuntimeError("a layer does not know what renews it; report this with the code")
            return True
        for prefix, plan in zip(prefixes, plans):
            if plan.delayed is not None and plan.delayed != self._delayed.get(prefix):
                self._keep_state(prefix, plan.delayed, graph_task_id() != -1)
        if PENDING:
            leave_state_to_ranks()
        return False

    def _state_device(self, prefix: str) -> torch.device:
        """Return the device of a stage's weight."""
        raise NotImplementedError(f"{type(self).__name__} does not tell its weights")

    def _states(self) -> dict[str, DelayedSlots | None]:
        """Return the state of each stage by its prefix; None without a rule."""
        states: dict[str, DelayedSlots | None] = {}
        for prefix in self._stage_names:
            own: Any = [own_buffers(self)[name] for name in state_names(prefix)]
            rule = self._delayed.get(prefix)
            states[prefix] = None if rule is None else DelayedSlots(rule, rule.fp8_format.maxes, *own)
        return states

    def _state_names(self) -> list[str]:
        return [name for prefix in self._stage_names for name in state_names(prefix)]

    @torch.inference_mode(False)
    def reset_delayed_scaling(self) -> None:
        """Start delayed scaling again, as if nothing was seen. State of an unknown recipe is dropped."""
        for prefix, slots in self._states().items():
            for name, buffer in zip(state_names(prefix), (None, None, None) if slots is None else slots[2:]):
                if buffer is not None and buffer.device != self._state_device(prefix):
                    # a model on meta that was assigned weights
                    buffer = torch.empty_like(buffer, device=self._state_device(prefix))
                own_buffers(self)[name] = buffer if buffer is None else buffer.zero_()

    def delayed_slots(self) -> list[DelayedSlots]:
        """Return the state, by stage, as it is to be renewed."""
        return [slots for slots in self._states().values() if slots is not None]

    def follows(self, stepped: Set[int], outside: bool) -> bool:
        """Return whether an optimizer's step renews the layer: one of its parameters was stepped, or none can be."""
        parameters = [one for one in own_parameters(self).values() if one is not None]
        if any(id(one) in stepped for one in parameters):
            return True
        return outside and not any(one.requires_grad for one in parameters)

    def lacks_reduction(self) -> bool:
        """Return whether ranks should agree on its amax, and never have."""
        return not self._reduced and any(slots is not None for _, slots in self.amax_to_reduce())

    def amax_to_reduce(self) -> list[tuple[int, DelayedSlots | None]]:
        """Return how many scales each state has that any rank's layer may have, and this one's, or None, to reduce."""
        states, (own, parts) = self._states().values(), self.part_of_experts
        kept = [None if slots is None or not slots.recipe.reduce_amax else slots for slots in states]
        return [(4 * self._groups, slots if part == own else None) for slots in kept for part in range(parts)]

    # -- what a forward reads ----------------------------------------------------------------------------------------

    def _scales_of(self, prefixes: tuple[str, ...], plans: tuple[LinearPlan, ...]) -> list[DelayedScales]:
        """Return the state of stages for one forward: nothing for a plan that scales nothing with delay.

        They collect in training mode, or with gradients.
        """
        scales, delayed = [], False
        for plan in plans:
            scales.append(DelayedScales())
            delayed = delayed or plan.delayed is not None
        if not delayed:
            return scales
        training, buffers = self.training, None
        collects = training or torch.is_grad_enabled()
        if not self._keep_states(prefixes, plans):
            buffers = own_buffers(self)
            self.__dict__["_forwards"] = self._forwards + training
            if training and self._forwards % LOOK_EVERY == 0:
                self._expect_renewal(prefixes[0])
        for prefix, plan, own in zip(prefixes, plans, scales):
            if plan.delayed is not None:
                scale, amax = f"{prefix}scale", f"{prefix}amax"
                own.scale = getattr(self, scale) if buffers is None else buffers[scale]
                if self._formats[prefix] is not plan.delayed.fp8_format:  # in evaluation or recomputation
                    own.scale = torch.zeros_like(own.scale)  # type: ignore[arg-type]
                if collects:
                    own.amax = getattr(self, amax) if buffers is None else buffers[amax]
        return scales

    def _expect_renewal(self, prefix: str) -> None:
        """Warn once if parameters change again and again while nothing renews the scales.

        Versions tell of both. Those of parameters that FSDP gathers or a fused step writes do not move.
        """
        scale = own_buffers(self)[f"{prefix}scale"]
        parameters = [one for one in own_parameters(self).values() if one is not None]
        if scale is None or any(one.is_inference() for one in parameters) or is_managed(self):
            return
        version = version_of(scale)
        before, seen = self._versions
        seen = {*(seen if version == before else ()), sum(map(version_of, parameters))}
        self.__dict__["_versions"] = version, seen
        if len(seen) > 2:
            warn_of_no_renewal(named_layer(self))

    # -- moving, saving, loading -------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedLayer:
        """Move the state with the layer, with its values: half-precision scales would lose amax, ``to_empty`` all."""
        before = {name: own_buffers(self)[name] for name in self._state_names()}
        super()._apply(fn, recurse)
        keep_values(self, before)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names, state_dict = self._state_names(), dict(state_dict)
        _, _, missing_keys, _, error_msgs = args
        extra = take_extra_state(state_dict, prefix)
        join_directions(state_dict, prefix, self._stage_names, self._groups)
        saved = [name for name in names if prefix + name in state_dict]
        if extra and not saved and (self._recipe is None or self.delayed_slots()):
            read = delayed_state(extra, sorted(self._stage_names), self._groups)
            state_dict.update({prefix + name: tensor for name, tensor in read.items()})
            saved = list(read)
        for stage in self._stage_names:
            error_msgs += self._adopt(state_names(stage), state_dict, prefix)
        known = [name for name in names if own_buffers(self)[name] is not None]
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._formats = {} if saved else self._formats
        for stage, rule in self._delayed.items():
            if rule is not None:  # a history in this recipe's length
                self._fit_buffers(stage, rule)
        if known and not saved and any(key.startswith(prefix) for key in state_dict):
            missing_keys[:] = [key for key in missing_keys if key.removeprefix(prefix) not in known]
            lacks = f"the checkpoint has no delayed-scaling state for {type(self).__name__} layers"
            remedy = "right for weights to begin with; to resume a run, load what it saved under this recipe"
            warnings.warn(f"{lacks}; scales start anew: {remedy}", stacklevel=3)  # equal texts: shown once
            self.reset_delayed_scaling()

    @torch.inference_mode(False)
    def _adopt(self, keys: tuple[str, ...], state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Make room for the saved state of one stage: a run that saved it knew the layer to be delayed.

        Returns:
            what is wrong with it.
        """
        width = 4 * self._groups
        saved = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        lacks = sorted(set(keys) - set(saved))
        if saved and lacks:
            return [f"{prefix}: the checkpoint has {sorted(saved)} and lacks {lacks}"]
        for key, tensor in saved.items():
            wanted = (max(tensor.numel() // width, 1), width) if "history" in key else (width,)
            if tensor.shape != wanted:
                shape = f"(rows, {width})" if "history" in key else f"({width},)"
                return [f"{prefix + key} has shape {tuple(tensor.shape)}; this layer keeps {shape}"]
            wrong = wrong_value(key, tensor)
            if wrong is not None:
                return [f"{prefix + key} holds {wrong}; a checkpoint's scales are finite and not below 0"]
        for key, tensor in saved.items():
            ours = own_buffers(self)[key]
            if ours is None or ours.shape != tensor.shape:
                device = tensor.device if ours is None else ours.device
                own_buffers(self)[key] = torch.empty_like(tensor, dtype=torch.float32, device=device)
        return []

    def __getstate__(self) -> dict[str, Any]:
        kept, autocasts = dict(self._delayed), self._last_recipe is not self._recipe
        if autocasts and any(asks_callables(slots.recipe) for slots in self.delayed_slots()):
            kept = {}  # functions need not pickle; a forward tells them again
        return {**super().__getstate__(), "_delayed": kept, "_reduced": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        OWNERS.add(self)


def _keep_states_while_tracing(context: Any) -> None:
    leave_state_to_ranks()
    layer, prefixes, plans = (traced_local(context, name) for name in ("self", "prefixes", "plans"))
    if is_in_backward() and layer._lent_in != graph_task_id():
        # a recomputation: the step follows the rule of the forwards, and keeps its history
        layer.__dict__["_lent_in"] = graph_task_id()
        at_end_of_backward(partial(layer._delayed.update, dict(layer._delayed)))
    for prefix, plan in zip(prefixes, plans):
        if is_in_backward() and plan.delayed is not None and layer._delayed.get(prefix) is not None:
            layer._delayed[prefix] = copy.copy(plan.delayed)
        layer._keep_state(prefix, plan.delayed)
