"""Delayed scaling's state as plain buffers of the layer that quantizes with it.

A tensor is cast with a scale that follows from the amax of earlier steps, so that one pass over it is enough. What
has to be kept is small: for each operand a scale, a history of amax, and the amax that the running step collects. It
is kept in buffers, because copies, devices, state dicts and ``_buffers`` swaps then treat it as any layer's. Three
things follow:

* Buffers exist from the moment at which a recipe says so: ``_keep_state`` makes them, while tracing, too.
* A forward that may have a backward reads copies of the scales (``_scales``), which are saved, so that a renewal in
  between changes nothing for the backward. The amax is written by kernels, into the buffer itself.
* Who renews depends on how the recipe came (``state/delayed_scaling.py``); a layer does it itself only where neither
  ``set_recipe`` nor an autocast of eager code does it for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._determinism import DETERMINISM
from .._tracing import can_read_tables, record, traced_local, while_tracing
from ..autograd import DelayedScales
from ..functional.recomputation import ASIDE, RUNNING, UNKNOWN_FORWARD, put_back, run_now
from ..recipe import (
    BACKWARD_TENSOR_TYPES,
    FORWARD_TENSOR_TYPES,
    WEIGHT_SLOT,
    DelayedScaling,
    LinearPlan,
    Mode,
    Recipe,
    linear_plan,
)
from ..reference.delayed import scale_from_amax
from ..state import (
    THREAD,
    AutocastState,
    DelayedSlots,
    Reduced,
    first_scale,
    fp8_max,
    register_delayed,
    renew,
    starts_a_step,
    warn_of_saturation,
)
from ..upstream.autograd import after_backward
from ..upstream.modules import own_buffers
from .extra_state import delayed_state, take_extra_state, wrong_value
from .fitted_scales import fit_first_scales, fit_in_evaluation, fit_in_graphs, forget_first_scales
from .parameters import largest_magnitude
from .read_scales import States, by_stage, copies_of, traced_copies
from .recipe_owner import RecipeOwner, forget_ended_roots
from .replicas import PENDING, leave_state_to_ranks
from .rules import Rules, keeps_rule

_DIRECTIONS: tuple[tuple[str, Mode, tuple[str, ...]], ...] = (
    ("fwd", "forward", FORWARD_TENSOR_TYPES),
    ("bwd", "backward", BACKWARD_TENSOR_TYPES),
)


def _buffer_names(prefix: str, direction: str) -> tuple[str, str, str]:
    """Scale, history and amax of a stage in one direction, in the order of :class:`..state.DelayedSlots`."""
    return f"{prefix}scale_{direction}", f"{prefix}amax_history_{direction}", f"{prefix}amax_{direction}"


class DelayedLayer(RecipeOwner):
    """Base of layers that may scale with delay.

    State of a stage, a linear layer inside, is six buffers: ``scale_fwd`` (3,), ``amax_history_fwd`` (L, 3) and
    ``amax_fwd`` (3,) for input, weight and output; ``scale_bwd`` (2,), ``amax_history_bwd`` (L, 2) and ``amax_bwd``
    (2,) for grad_output and grad_input; fp32, under the stage's prefix. They are None until the layer is to run under
    delayed scaling, and in the state dict from then on. A scale of 0 means that nothing was seen: the tensor is then
    cast with the scale of its own amax.
    """

    codes_are_written: bool = False
    """An optimizer writes the quantized weights of this layer; see ``layers/written_weights.py``."""
    _stage_names: dict[str, str]
    _delayed: dict[str, Rules]
    _groups: int = 1  # slots of each tensor type
    _module_type: str = "linear"  # in quantizer roles
    _starts: bool = False  # it may have first scales, which were not checked for saturation yet
    _has_trained: bool = False  # a training forward may have collected since
    _parallel: Any = None  # how the layer is split over ranks that join codes; None if it is not

    def _init_delayed(self, stage_names: dict[str, str]) -> None:
        """
        Args:
            stage_names: prefix of the buffers -> name in quantizer roles, of each stage.
        """
        self._stage_names, self._delayed = stage_names, {}
        self._registered_with: tuple[str, ...] = ()  # thread and recipe of autocasts that renew it
        self._starts = self._has_trained = False
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
            self._keep_state(prefix, plan.forward_state, plan.backward_state)

    def _keep_state(
        self,
        prefix: str,
        forward: DelayedScaling | None,
        backward: DelayedScaling | None,
        roots: tuple[str, ...] | None = None,
        tracing: bool = False,
    ) -> None:
        """Create the buffers that these need, with their history lengths; existing ones stay.

        Args:
            roots: of a forward, the models whose forward is traced.
            tracing: a traced forward registers, whatever it begins.
        Raises:
            RuntimeError: the model that renews the state has begun its forward under another rule.
        """
        state, wanted, known, stays = THREAD.state, (forward, backward), self._delayed.get(prefix), False
        if roots is not None and known != wanted:
            amaxes = [
                own_buffers(self)[_buffer_names(prefix, direction)[2]] for direction, _, _ in _DIRECTIONS
            ]
            stays = keeps_rule(self, known, wanted, amaxes, roots)
        if forward is None and backward is None and known is not None:
            return
        unknown = state.depth and f"{state.thread} {state.number}" not in self._registered_with
        if unknown and self.training and (forward or backward) and (tracing or starts_a_step()):
            self._register_with(state)
        known = self._delayed.get(prefix)
        # an equal recipe does not take its place: guards of the compiler on the object that is kept would fail at once
        if stays or known == wanted:
            return
        for delayed, (direction, mode, kinds) in zip((forward, backward), _DIRECTIONS):
            if delayed is not None:
                self._fit_buffers(prefix, direction, mode, len(kinds) * self._groups, delayed)
        if not state.depth:
            self.__dict__["_registered_with"] = ()  # no graph of an autocast fits these rules
        self._delayed[prefix] = (forward, backward)

    def _register_with(self, state: AutocastState) -> None:
        """Register with the autocasts of this thread for renewal, and do what the present one could not.

        A layer that was restored or copied, or that trained outside by another rule, comes with the amax of its last
        step. One that ran under another recipe is renewed as this one says from now on; no graph that was traced under
        the other fits it. A recomputation leaves the rule: where it is another, its graph fits until the backward ends.
        """
        is_new = self not in state.delayed or not self._registered_with
        kept = [known for known in self._registered_with if known.endswith(f" {state.number}")]
        if not (kept or starts_a_step()):
            after_backward(partial(self.__dict__.__setitem__, "_registered_with", self._registered_with))
        self.__dict__["_registered_with"] = (*kept, f"{state.thread} {state.number}")
        register_delayed(self)
        recipe = state.recipe or state.calibrating
        if recipe is not None and starts_a_step():
            self._keep_state_of(recipe)
        keeps_scales = any(context.graph for context in state.entered)
        if is_new and state.recipe is not None and not keeps_scales and starts_a_step():
            renew([self])

    @torch.inference_mode(False)  # a layer may see inference first and then be trained
    @torch.no_grad()
    def _fit_buffers(
        self, prefix: str, direction: str, mode: Mode, slots: int, delayed: DelayedScaling
    ) -> None:
        names, length = _buffer_names(prefix, direction), delayed.amax_history_len
        history = getattr(self, names[1])
        if history is None:
            device = self._state_device(prefix)
            for name, shape in zip(names, ((slots,), (length, slots), (slots,))):
                setattr(self, name, torch.zeros(shape, dtype=torch.float32, device=device))
            self._reset_direction(prefix, direction, mode, delayed)
        elif history.shape[0] != length:
            # a shorter history keeps the first rows, a longer one gets rows of zeros
            fitted = history.new_zeros(length, history.shape[1])
            kept = min(length, history.shape[0])
            fitted[:kept] = history[:kept]
            setattr(self, names[1], fitted)

    def _keep_states(self, prefixes: tuple[str, ...], plans: tuple[LinearPlan, ...]) -> bool:
        """Call :meth:`_keep_state` for all stages before any is read, in traced and eager code.

        Returns:
            Whether code is traced.
        """
        states = [(plan.forward_state, plan.backward_state) for plan in plans]
        if not torch.compiler.is_compiling():
            for prefix, (forward, backward) in zip(prefixes, states):
                self._keep_state(prefix, forward, backward, ())
            return False
        # read to be guarded: another thread, or an autocast with another recipe, traces again, and so registers
        by, roots = f"{THREAD.state.thread} {THREAD.state.number}", THREAD.state.roots
        if by or roots:  # always
            while_tracing(_keep_states_while_tracing)
        # another layer, which a graph fits too, registers by being traced as well: a copy, or one that was loaded.
        # Under an autocast that the graph itself enters, the graph renews
        known = not self.training or by in self._registered_with
        if THREAD.state.depth and not THREAD.state.traced and not known:
            raise RuntimeError(
                "an autocast does not know a layer that is traced under it; report this with the code"
            )
        return True

    def _state_device(self, prefix: str) -> torch.device:
        return self._weight_of_state(prefix).device

    def _weight_of_state(self, prefix: str) -> Tensor:
        """Return the weight that the stage of this prefix multiplies with."""
        raise NotImplementedError(f"{type(self).__name__} does not tell its weights")

    def _reset_direction(
        self, prefix: str, direction: str, mode: Mode, delayed: DelayedScaling, from_weights: bool = True
    ) -> None:
        scale, history, amax = self._slots(prefix, direction, mode, delayed)[2:5]
        self.__dict__.update(_starts=True, _has_trained=False)
        history.zero_()
        amax.zero_()
        scale.zero_()
        if mode == "forward":
            of_weights = scale[WEIGHT_SLOT * self._groups :][: self._groups].fill_(first_scale(delayed, mode))
            if from_weights and not scale.is_meta:
                weight_amax = self._weight_amax(prefix).to(scale.device)
                largest = fp8_max(delayed, mode)
                of_weights.copy_(scale_from_amax(weight_amax, of_weights, largest, delayed.margin))

    def _weight_amax(self, prefix: str) -> Tensor:
        """Return max|w| of the weight of every group, fp32."""
        return largest_magnitude(self._weight_of_state(prefix))

    def _weights_by_group(self, prefix: str) -> list[tuple[int, Tensor]]:
        """The weights of a stage, each with its group; parts of one weight share a group."""
        return []

    def reset_delayed_scaling(self) -> None:
        """Start delayed scaling again: scales as its recipe says, no amax. State of an unknown recipe is dropped."""
        self._start_anew()

    @torch.no_grad()
    def _start_anew(self, from_weights: bool = True) -> None:
        """Reset like :meth:`reset_delayed_scaling`; ``from_weights=False`` derives no scale from weights."""
        self._put_back()
        for prefix in self._stage_names:
            states = self._delayed.get(prefix, (None, None))
            for delayed, (direction, mode, _) in zip(states, _DIRECTIONS):
                if delayed is not None:
                    self._reset_direction(prefix, direction, mode, delayed, from_weights)
                else:
                    for name in _buffer_names(prefix, direction):
                        setattr(self, name, None)

    def delayed_slots(self) -> list[DelayedSlots]:
        """Return the state, by stage and direction, as it is to be renewed."""
        return [slots for states in self._states_by_stage() for slots in states]

    def _states_by_stage(self) -> list[list[DelayedSlots]]:
        """Return the state of each stage that has one."""
        return [states for prefix in self._delayed if (states := self._states_of(prefix))]

    def _states_of(self, prefix: str) -> list[DelayedSlots]:
        """Return the state of a stage, by direction."""
        rules = zip(self._delayed.get(prefix, (None, None)), _DIRECTIONS)
        return [
            self._slots(prefix, direction, mode, delayed)
            for delayed, (direction, mode, _) in rules
            if delayed is not None
        ]

    def amax_to_reduce(self) -> list[Reduced]:
        """Return each state that the layer may have, by stage and direction; without tensors if it reduces none."""
        brought: list[Reduced] = []
        for prefix in self._stage_names:
            states = self._delayed.get(prefix, (None, None))
            for delayed, (direction, _, kinds) in zip(states, _DIRECTIONS):
                scale, _, amax = (getattr(self, name) for name in _buffer_names(prefix, direction))
                if delayed is None or not delayed.reduce_amax:
                    scale = amax = None
                brought.append(Reduced(len(kinds) * self._groups, amax, scale))
        return brought

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._put_back()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _slots(
        self, prefix: str, direction: str, mode: Mode, delayed: DelayedScaling, renews: bool | None = True
    ) -> DelayedSlots:
        """Return the state of a stage in one direction; in a graph that does not renew it, without history."""
        scale, history, amax = _buffer_names(prefix, direction)
        if can_read_tables():
            buffers: Any = own_buffers(self)
            state = buffers[scale], buffers[history], buffers[amax]
        else:
            state = getattr(self, scale), getattr(self, history) if renews else None, getattr(self, amax)
        shared = self._parallel is not None or bool(DETERMINISM.batch_invariant)
        return record(DelayedSlots, (delayed, mode, *state, shared))

    # -- what a forward reads ----------------------------------------------------------------------------------------

    def _scales(self, prefix: str, plan: LinearPlan) -> DelayedScales:
        """Return the state for one forward of a stage; nothing for a plan that scales nothing with delay."""
        return self._scales_of((prefix,), (plan,))[0]

    def _scales_of(
        self,
        prefixes: tuple[str, ...],
        plans: tuple[LinearPlan, ...],
        layers: tuple[DelayedLayer, ...] = (),
        scales: list[DelayedScales] | None = None,
    ) -> list[DelayedScales]:
        """Return :meth:`_scales` of consecutive stages, renewed and read at once.

        Args:
            layers: the owner of each stage, in eager code, renewed like this one; none: this one.
            scales: to fill in, and returned.
        """
        scales = scales or [DelayedScales() for _ in plans]
        if not [plan for plan in plans if plan.forward_state or plan.backward_state]:
            return scales
        compiling, recorded = False, torch.is_grad_enabled()
        if layers:
            for layer, prefix, plan in zip(layers, prefixes, plans):
                layer._keep_state(prefix, plan.forward_state, plan.backward_state, ())
        else:
            compiling, layers = self._keep_states(prefixes, plans), (self,) * len(plans)
        # a graph without gradients may be the first run of a reentrant checkpoint: what does not count is put back
        collects = self.training and (recorded or compiling)
        # without gradients, too: so runs the first forward of a reentrant checkpoint; renewing early changes no scale
        renews, root = self.training, ""
        if THREAD.state.depth:
            renews = renews and THREAD.state.traced
        elif self._renewed_by_root:
            # while its forward runs; of one in eager code a graph finds that when it runs
            root = self._root or ""
            if THREAD.state.roots and not compiling:
                forget_ended_roots()
            renews = renews and bool(root) and root not in THREAD.state.roots
            if renews and not compiling:
                renews = not RUNNING.runs(root)
        states: list[States] = []
        for layer, prefix, plan, own in zip(layers, prefixes, plans, scales):
            fwd = bwd = None
            if plan.forward_state is not None:
                fwd = layer._slots(prefix, "fwd", "forward", plan.forward_state, renews)
                own.amax_fwd = fwd.amax if collects else None
            if plan.backward_state is not None:
                bwd = layer._slots(prefix, "bwd", "backward", plan.backward_state, renews)
                own.amax_bwd = bwd.amax if collects else None
            states.append((fwd, bwd))
        if compiling:
            self._read_in_graph(scales, states, bool(renews), root)
            if not self.training:
                fit_in_evaluation(self, prefixes, plans, scales)
            return scales
        if PENDING:
            leave_state_to_ranks()
        if ASIDE:
            self._put_back()
        starts = starts_a_step()
        run = run_now()
        amaxes = [state.amax for stage in states for state in stage if state is not None]
        if run is not None and not self.training and not run.knows(amaxes):
            run = None  # a backward may evaluate what no forward has run
        if run is None and self.training and recorded and not starts:
            raise RuntimeError(UNKNOWN_FORWARD)
        if self._starts and self.training and starts:
            begins = prefixes[0] == next(iter(self._stage_names)) or len(prefixes) > 1
            if renews and begins:  # of an earlier forward
                warn_of_saturation([self])
            self._fit_first_scales(prefixes, plans)
            self.__dict__["_has_trained"] = True
        read = partial(copies_of, states, renews)
        for own, copies in zip(scales, by_stage(states, read() if run is None else run.read(amaxes, read))):
            own.scale_fwd, own.scale_bwd = copies
        if run is not None:
            collects = self.training and run.collects(recorded)
            for own, (fwd, _) in zip(scales, states):
                own.amax_fwd = fwd.amax if fwd is not None and collects else None
        if not self.training:
            fit_in_evaluation(self, prefixes, plans, scales)
        return scales

    def _read_in_graph(
        self, scales: list[DelayedScales], states: list[States], renews: bool, root: str
    ) -> None:
        recorded = torch.is_grad_enabled()
        counts = self.training or recorded
        read = traced_copies(states, renews, recorded, root) if counts else copies_of(states, False)
        for own, (fwd, _), copies in zip(scales, states, by_stage(states, read)):
            own.scale_fwd, own.scale_bwd = copies
            if fwd is not None and own.amax_fwd is not None:
                # known as a forward's: a backward collects nothing there
                own.amax_fwd = fwd.amax.view(1, -1)

    def _fit_first_scales(self, prefixes: tuple[str, ...], plans: tuple[LinearPlan, ...]) -> None:
        for prefix, plan in zip(prefixes, plans):
            if self._starts and plan.forward_state is not None:
                fit_first_scales(self, prefix, plan, self._states_of(prefix))

    # -- moving, saving, loading -------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedLayer:
        """Move the state with the layer, with its values: half-precision scales would lose amax, ``to_empty`` all."""
        self._put_back()
        before = {name: own_buffers(self)[name] for name in self._state_names()}
        super()._apply(fn, recurse)
        left_meta = False
        for name, tensor in before.items():
            moved = own_buffers(self)[name]
            if tensor is None or moved is None or moved is tensor:
                continue
            if moved.dtype != torch.float32 or moved.is_inference():
                with torch.inference_mode(False):  # the layer may be trained later
                    moved = torch.zeros(tensor.shape, dtype=torch.float32, device=moved.device)
                own_buffers(self)[name] = moved
            if tensor.is_meta:
                left_meta |= not moved.is_meta
            else:
                moved.copy_(tensor)
        if left_meta:  # to uninitialized memory, the weights as well
            self._start_anew(from_weights=False)
        return self

    def _state_names(self) -> list[str]:
        return [
            name
            for prefix in self._stage_names
            for direction, _, _ in _DIRECTIONS
            for name in _buffer_names(prefix, direction)
        ]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._put_back()  # else what is loaded would be
        names, state_dict = self._state_names(), dict(state_dict)
        extra = take_extra_state(state_dict, prefix)
        saved = [name for name in names if prefix + name in state_dict]
        if extra and not saved and (self._recipe is None or self.delayed_slots()):
            widths = {direction: len(kinds) * self._groups for direction, _, kinds in _DIRECTIONS}
            read = delayed_state(extra, sorted(self._stage_names), widths)
            state_dict.update({prefix + name: tensor for name, tensor in read.items()})
            saved = list(read)
        for stage in self._stage_names:
            for direction, _, kinds in _DIRECTIONS:
                width = len(kinds) * self._groups
                error_msgs += self._adopt(_buffer_names(stage, direction), width, state_dict, prefix)
        known = [name for name in names if own_buffers(self)[name] is not None]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if saved:  # a state without history is that of a layer before its first step, and so it goes on
            self.__dict__["_starts"] = True
            for stage in self._stage_names:
                for direction, _, kinds in _DIRECTIONS:
                    scale, history, amax = (
                        own_buffers(self)[name] for name in _buffer_names(stage, direction)
                    )
                    forget_first_scales(scale, history, amax, kinds)
        for stage, states in self._delayed.items():  # a history in this recipe's length
            for delayed, (direction, mode, kinds) in zip(states, _DIRECTIONS):
                if delayed is not None:
                    self._fit_buffers(stage, direction, mode, len(kinds) * self._groups, delayed)
        if known and not saved and any(key.startswith(prefix) for key in state_dict):
            missing_keys[:] = [key for key in missing_keys if key.removeprefix(prefix) not in known]
            self._start_without_checkpoint(prefix)

    @torch.inference_mode(False)
    def _adopt(self, keys: tuple[str, ...], width: int, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Make room for the saved state of one direction: a run that saved it knew the layer to be delayed.

        Returns:
            what is wrong with it.
        """
        saved = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        if saved and len(saved) < len(keys):
            return [
                f"{prefix}: the checkpoint has {sorted(saved)} and lacks {sorted(set(keys) - set(saved))}"
            ]
        for key, tensor in saved.items():
            wanted = (max(tensor.numel() // width, 1), width) if "history" in key else (width,)
            if tensor.shape != wanted:
                shape = f"(rows, {width})" if "history" in key else f"({width},)"
                return [f"{prefix + key} has shape {tuple(tensor.shape)}; this layer keeps {shape}"]
            wrong = wrong_value(key, tensor)
            if wrong is not None:
                return [
                    f"{prefix + key} holds {wrong}; a checkpoint's scales are finite, a weight's above 0, none below"
                ]
        for key, tensor in saved.items():
            ours = own_buffers(self)[key]
            if ours is None or ours.shape != tensor.shape:
                device = tensor.device if ours is None else ours.device
                own_buffers(self)[key] = torch.empty_like(tensor, dtype=torch.float32, device=device)
        return []

    @torch.inference_mode(False)
    def _start_without_checkpoint(self, prefix: str) -> None:
        warnings.warn(
            f"the checkpoint has no delayed-scaling state for {prefix.rstrip('.') or type(self).__name__}; its scales "
            "start anew",
            stacklevel=4,
        )
        for stage in self._stage_names:
            device = self._state_device(stage)  # not the state's where a model on meta was assigned weights
            for direction, _, _ in _DIRECTIONS:
                for name in _buffer_names(stage, direction):
                    buffer = own_buffers(self)[name]
                    if buffer is not None and buffer.device != device:
                        own_buffers(self)[name] = torch.zeros(
                            buffer.shape, dtype=torch.float32, device=device
                        )
        self.reset_delayed_scaling()

    def state_buffers(self) -> list[Tensor]:
        """Return every buffer of the state, of a recipe that is no longer in force, too."""
        buffers = [own_buffers(self)[name] for name in self._state_names()]
        return [buffer for buffer in buffers if buffer is not None]

    def _put_back(self) -> None:
        """Undo in the buffers what a recomputation, or a graph without gradients, has written there."""
        if ASIDE:
            put_back(self.state_buffers())

    def __getstate__(self) -> dict[str, Any]:
        self._put_back()
        # without the recipes of others, which need not pickle; the next forward tells them
        return {**super().__getstate__(), "_registered_with": (), "_delayed": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        before = {name: own_buffers(self)[name] for name in self._state_names()}
        self._prepare_for_recipe()
        # an autocast may have kept more rows than the layer's own recipe asks for: the next forward tells
        for prefix, states in self._delayed.items():
            self._delayed[prefix] = tuple(  # type: ignore[assignment]
                self._with_history(delayed, _buffer_names(prefix, direction)[1], before)
                for delayed, (direction, _, _) in zip(states, _DIRECTIONS)
            )

    def _with_history(
        self, delayed: DelayedScaling | None, name: str, before: dict[str, Tensor | None]
    ) -> DelayedScaling | None:
        history = before[name]
        if delayed is None or history is None or len(history) == delayed.amax_history_len:
            return delayed
        own_buffers(self)[name] = history
        self.__dict__["_registered_with"] = ("another",)
        return replace(delayed, amax_history_len=len(history))


def read_together(stages: Sequence[tuple[DelayedLayer, LinearPlan, DelayedScales]]) -> None:
    """Fill in the state for one forward, in eager code, of layers of one stage each: at once if renewed alike.

    Not in evaluation, nor as long as first scales may have to be fitted, which is up to each layer.
    """
    layers, plans = tuple([stage[0] for stage in stages]), tuple([stage[1] for stage in stages])
    first, together = layers[0], len(set(layers)) == len(layers)
    for layer in layers:
        together &= layer.training and not layer._starts and layer._root == first._root
        together &= layer._renewed_by_root is first._renewed_by_root
        layer._put_back()
    if together:
        first._scales_of(("",) * len(layers), plans, layers, [stage[2] for stage in stages])
    else:
        for layer, plan, scales in stages:
            layer._scales_of(("",), (plan,), (), [scales])


def _keep_states_while_tracing(context: Any) -> None:
    leave_state_to_ranks()
    layer, prefixes, plans, states, roots = (
        traced_local(context, name) for name in ("self", "prefixes", "plans", "states", "roots")
    )
    for prefix, (forward, backward) in zip(prefixes, states):
        layer._keep_state(prefix, forward, backward, roots, tracing=True)
    if layer._starts and layer.training and starts_a_step():
        fit_in_graphs(layer, prefixes, plans)
        layer.__dict__["_has_trained"] = True
