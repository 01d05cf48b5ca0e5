"""Recomputation: ``checkpoint``, and what a recomputed layer reads of delayed scaling: what its forward read."""

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

    Those of the layers themselves may have been renewed until then, by a forward that ran in between. ``collects``:
    layers in training collect the amax of their operands, which is once: in the first run.
    """

    def __init__(self, kept: list[Scales], again: bool, grad: bool, around: ReadScales | None) -> None:
        self.kept, self.again, self.around = kept, again, around
        self.collects = not again and (grad if around is None else around.collects)
        self.count = 0

    def take(self) -> Scales | None:
        """What the layer that runs now has read before; None in a first run."""
        if self.again and self.count < len(self.kept):
            self.count += 1
            return self.kept[self.count - 1]
        found = None if self.around is None else self.around.take()
        if found is not None and not self.again:
            self.kept.append(found)
        return found

    def keep(self, scales: Scales) -> Scales:
        """Remember what the layer reads that runs now."""
        if not self.again:
            self.kept.append(scales)
        return scales if self.around is None else self.around.keep(scales)


def scales_read_in_checkpoint(training: bool) -> ReadScales | None:
    """What the checkpointed function has read that runs now, be the checkpoint ours or, in eager code, PyTorch's own.

    PyTorch's says to nobody which forward it repeats, but keeps an object for each: that takes what was read along.

    Args:
        training: the layer that asks may have its scales renewed.
    """
    if THREAD.state.read is not None:
        return THREAD.state.read
    owner, run, grad = None, None, torch.is_grad_enabled()
    if grad:
        owner, run = _frame_of_saved_tensors()
    if owner is None and training and not (grad and starts_a_step()):
        owner, run = _context_of_reentrant()
        grad = owner is not None and any(owner.needs_input_grad)
    if owner is None:
        return None
    reads = vars(owner).setdefault("_narrowcast_reads", {None: ReadScales([], False, grad, None)})
    if run not in reads:
        reads[run] = ReadScales(reads[None].kept, True, grad, None)
    return reads[run]  # type: ignore[no-any-return]


def _frame_of_saved_tensors() -> tuple[Any, Any]:
    """The frame of a non-reentrant checkpoint, which the hooks in force for saved tensors hold, and which run it is.

    (None, None) where there is none, or hooks of the user's lie above. The first run is None.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", None) != torch.utils.checkpoint.__name__:
        return None, None
    held = inspect.getclosurevars(pack).nonlocals  # type: ignore[arg-type]
    again = held.get("target_frame_ref")
    return held.get("frame") if again is None else again(), held.get("gid")


def _context_of_reentrant() -> tuple[Any, Any]:
    """The context of the reentrant checkpoint that calls, and which run it is, as above."""
    function = torch.utils.checkpoint.CheckpointFunction
    runs = {function.forward.__code__: None, function.backward.__code__: torch._C._current_graph_task_id()}
    caller: Any = sys._getframe(1)
    while caller is not None and caller.f_code not in runs:
        caller = caller.f_back
    return (None, None) if caller is None else (caller.f_locals["ctx"], runs[caller.f_code])


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the code that runs now is inside of :func:`checkpoint`, under a recipe of an autocast."""
    return THREAD.state.read is not None and is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether it is so, and this is the recomputation."""
    read = THREAD.state.read
    return read is not None and read.again and is_fp8_enabled()


class _under:
    """Enter a state that :meth:`AutocastState.get` gave, for a checkpointed function: its first run, or another."""

    def __init__(self, values: tuple[Any, ...], kept: list[Scales], again: bool, grad: bool) -> None:
        self.values, self.kept, self.again, self.grad = values, kept, again, grad

    def __enter__(self) -> None:
        state = THREAD.state
        self.previous, self.around = state.get(), state.read
        state.set(self.values)
        state.read = ReadScales(self.kept, self.again, self.grad, None if self.again else self.around)

    def __exit__(self, *exception: Any) -> None:
        THREAD.state.set(self.previous)
        THREAD.state.read = self.around


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
    last forward. This one also holds where a layer ran under several; and, in eager code, for one inside of another
    where delayed scaling was renewed between the forward and its recomputation: that reads the scales of its forward.

    Args:
        function: what to recompute in the backward.
        use_reentrant: as in PyTorch; only the non-reentrant form compiles.
        distribute_saved_activations: must be False; ``tp_group`` is what Transformer Engine distributes them over, and
            is not read.
        get_rng_state_tracker: returns an object that keeps random states of its own, by ``get_states()`` and
            ``set_states(states)``; the recomputation starts from those of the first forward. Eager code only.
        **kwargs: for the function and, as in PyTorch, for the checkpoint.
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
    values = THREAD.state.get()
    tracker = None if get_rng_state_tracker is None else _Tracked(get_rng_state_tracker())
    kept: list[Scales] = []
    runs, grad = itertools.count(), torch.is_grad_enabled()

    @functools.wraps(function)
    def under_recipe(*inner_args: Any, **inner_kwargs: Any) -> Any:
        under = _under(values, kept, next(runs) > 0, grad)
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
