"""Recomputation: ``checkpoint``, and what a recomputed layer reads of delayed scaling: what its forward read.

A checkpoint drops what its function saved, and runs it a second time in the backward. Under delayed scaling that run
must see the scales of the first one, which the layers may have renewed in between. The layers cannot be asked: one
may run several times in a function, and several forwards may be under way. So every run of a checkpointed function
writes down, in order, the copies of scales that its layers read, and every later run of it is handed these again.

The list hangs on the object that PyTorch makes for each forward of a checkpoint, and goes when that goes. Nothing
passes this object to the function, but it can be found: the hooks for saved tensors of the non-reentrant form hold
it, and a frame of the call stack those of the reentrant form. Checkpoints may lie inside of each other; the inner
one, which is made anew by every run of the outer one, then takes its scales from that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from .autocast import THREAD, is_fp8_enabled, starts_a_step

Scales = tuple[Tensor | None, Tensor | None]


class ReadScales:
    """The scales that the layers inside a checkpointed function read, in order: copies, the same for its recomputation.

    Those of the layers themselves may have been renewed until then, by a forward that ran in between.

    Args:
        kept: what the first run has read, and where that is kept.
        rerun: this is not the first run.
        gradients: a reentrant checkpoint will have gradients, which none of its layers can tell in its first run.
        around: of the checkpoint around this one.
    """

    def __init__(self, kept: list[Scales], rerun: bool, gradients: bool, around: ReadScales | None) -> None:
        self.kept, self.rerun, self.around = kept, rerun, None if rerun else around
        self.repeats = rerun or (around is not None and around.repeats)
        self.gradients = gradients or (around is not None and around.gradients)
        self.count = 0

    def collects(self) -> bool:
        """Whether a layer in training collects the amax of its operands, which is once: in the first run of all."""
        return not self.repeats and (torch.is_grad_enabled() or self.gradients)

    def take(self) -> Scales | None:
        """What the layer that runs now has read before; None in a first run."""
        if self.rerun and self.count < len(self.kept):
            self.count += 1
            return self.kept[self.count - 1]
        found = None if self.around is None else self.around.take()
        if found is not None and not self.rerun:
            self.kept.append(found)
        return found

    def keep(self, scales: Scales) -> Scales:
        """Remember what the layer reads that runs now."""
        if not self.rerun:
            self.kept.append(scales)
        return scales if self.around is None else self.around.keep(scales)


def scales_read_in_checkpoint(training: bool) -> ReadScales | None:
    """What the checkpointed function has read that runs now in eager code, be it called by PyTorch's or by ours.

    PyTorch's says to nobody which forward it repeats, but keeps an object for each: that takes what was read along.
    Of checkpoints inside of each other the innermost, which asks the one around.

    Args:
        training: the layer that asks may have its scales renewed.
    """
    runs = _runs_by_saved_tensors()
    if training and not (torch.is_grad_enabled() and starts_a_step()):
        # no gradients are recorded in the first run of a reentrant one, so none of the others lies inside of that
        reentrant = _runs_of_reentrant()
        recomputations = [(owner, run) for owner, run in reentrant if run is not None]
        runs = recomputations + runs + [(owner, run) for owner, run in reentrant if run is None]
    read: ReadScales | None = None
    for owner, run in runs:
        reads = vars(owner).setdefault("_narrowcast_reads", {})
        if run not in reads:
            kept = reads[None].kept if None in reads else []
            reads[run] = ReadScales(kept, run is not None, any(getattr(owner, "needs_input_grad", ())), read)
        read = reads[run]
    return read


def _runs_by_saved_tensors() -> list[tuple[Any, Any]]:
    """The frames of the non-reentrant checkpoints that run, outermost first, and which run of each; the first is None.

    The hooks in force for saved tensors hold them. PyTorch shows only those on top; the others by taking these away.
    """
    autograd = torch._C._autograd  # type: ignore[attr-defined]
    hooks: list[Any] = []
    if autograd._saved_tensors_hooks_is_enabled():
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
    runs = []
    for pack, _ in reversed(hooks):
        pack = inspect.unwrap(pack)
        if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__:
            held = inspect.getclosurevars(pack).nonlocals
            first_frame = held.get("target_frame_ref")
            runs.append((held.get("frame") if first_frame is None else first_frame(), held.get("gid")))
    return [(frame, run) for frame, run in runs if frame is not None]


def _runs_of_reentrant() -> list[tuple[Any, Any]]:
    """The contexts of the reentrant checkpoints that run, and which run of each, as above."""
    function = torch.utils.checkpoint.CheckpointFunction
    runs = {function.forward.__code__: None, function.backward.__code__: torch._C._current_graph_task_id()}
    found, caller = [], sys._getframe(1)
    while caller is not None:
        if caller.f_code in runs:
            found.append((caller.f_locals["ctx"], runs[caller.f_code]))
        caller = caller.f_back
    return found[::-1]


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the code that runs now is inside of :func:`checkpoint`, under a recipe of an autocast."""
    return THREAD.state.recomputes is not None and is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether it is so, and this is the recomputation."""
    return bool(THREAD.state.recomputes) and is_fp8_enabled()


class _under:
    """Enter a state that :meth:`AutocastState.get` gave, for a checkpointed function: its first run, or another."""

    def __init__(self, values: tuple[Any, ...], rerun: bool) -> None:
        self.values, self.rerun = values, rerun

    def __enter__(self) -> None:
        state = THREAD.state
        self.previous = state.get(), state.recomputes
        state.set(self.values)
        state.recomputes = self.rerun

    def __exit__(self, *exception: Any) -> None:
        values, recomputes = self.previous
        THREAD.state.set(values)
        THREAD.state.recomputes = recomputes


_CHECKPOINT_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint`` whose recomputation runs under the recipe of the first forward.

    PyTorch's own does, too: a layer that runs inside a backward, outside of any autocast, runs under the recipe of its
    last forward. This one also holds where a layer ran under several.

    Args:
        function: what to recompute in the backward.
        use_reentrant: as in PyTorch; only the non-reentrant form compiles.
        distribute_saved_activations: must be False; ``tp_group`` is what Transformer Engine distributes them over, and
            is not read.
        get_rng_state_tracker: returns an object that keeps random states of its own, by ``get_states()`` and
            ``set_states(states)``; the recomputation starts from those of the first forward. Eager code only.
        **kwargs: for the function and, by PyTorch's names, for the checkpoint.
    Raises:
        NotImplementedError: ``distribute_saved_activations``, or a tracker in compiled code.
    """
    run = torch.utils.checkpoint.checkpoint
    compiling = torch.compiler.is_compiling()
    if distribute_saved_activations or (compiling and get_rng_state_tracker is not None):
        option = "distribute_saved_activations" if distribute_saved_activations else "get_rng_state_tracker"
        raise NotImplementedError(
            f"checkpoint does not take {option}{'' if distribute_saved_activations else ' in compiled code'}; leave it "
            "out"
        )
    if compiling:
        return run(function, *args, use_reentrant=False, **kwargs)
    if use_reentrant:  # PyTorch's reentrant checkpoint takes no keywords for the function
        own = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
        kwargs = {name: value for name, value in kwargs.items() if name in _CHECKPOINT_OPTIONS}
        function = functools.partial(function, **own)
    values = THREAD.state.get()
    tracker = None if get_rng_state_tracker is None else _Tracked(get_rng_state_tracker())
    runs = itertools.count()

    @functools.wraps(function)
    def under_recipe(*inner_args: Any, **inner_kwargs: Any) -> Any:
        under = _under(values, next(runs) > 0)
        with under, contextlib.nullcontext() if tracker is None else tracker:
            return function(*inner_args, **inner_kwargs)

    return run(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)


class _Tracked:
    """Entered by a forward, then by each of its recomputations, which begin with the random states of the forward."""

    def __init__(self, tracker: Any) -> None:
        self.tracker, self.first, self.after = tracker, None, None

    def __enter__(self) -> None:
        now = dict(self.tracker.get_states())
        if self.first is None:
            self.first = now
        else:
            self.after = now
            self.tracker.set_states(dict(self.first))

    def __exit__(self, *exception: Any) -> None:
        if self.after is not None:
            self.tracker.set_states(self.after)
