"""Private names of autograd and ``torch.utils.checkpoint``: running backwards, hooks, versions."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .private import entry, private
from .tensors import version_of

_GRAPH_TASKS = "torch/csrc/autograd/python_engine.cpp"
_HOOKS = "torch/csrc/autograd/saved_variable_hooks.h and torch/autograd/graph.py, saved_tensors_hooks"

graph_task_id: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    follows=_GRAPH_TASKS,
    without="delayed scaling and recomputation cannot tell a backward; use a tested release",
)
"""The number of the backward that runs in this thread; -1 outside any. Dynamo traces it as a constant."""

_are_hooks_enabled: Callable[[], bool] = private(
    "torch._C._autograd._saved_tensors_hooks_is_enabled",
    follows=_HOOKS,
    without="the hooks are looked for all the same",
    fallback=lambda: True,
)
_WITHOUT_HOOKS = (
    "a recomputation under delayed scaling or outside of its autocast cannot find its forward; use "
    "torch.utils.checkpoint with use_reentrant=True, or layers' own recipes without delayed scaling"
)
_top_hooks: Any = private(
    "torch._C._autograd._top_saved_tensors_default_hooks", follows=_HOOKS, without=_WITHOUT_HOOKS
)
top_hooks: Callable[[bool], Any] = _top_hooks or (lambda _: None)
"""Given True: the innermost pair of hooks for saved tensors; None if there is none, or on a release that hides it."""

_pop_hooks: Any = private(
    "torch._C._autograd._pop_saved_tensors_default_hooks", follows=_HOOKS, without=_WITHOUT_HOOKS
)
_push_hooks: Any = private(
    "torch._C._autograd._push_saved_tensors_default_hooks", follows=_HOOKS, without=_WITHOUT_HOOKS
)
_CHECKPOINT_HOOKS = entry(
    "torch.utils.checkpoint._checkpoint_hook and _recomputation_hook: `frame`, `target_frame_ref` and `gid` in the "
    "closures of their pack hooks",
    follows="torch/utils/checkpoint.py, class _CheckpointFrame",
    without=_WITHOUT_HOOKS,
)
_FUNCTION_FRAMES = entry(
    "the context of a running torch.autograd.Function, the first argument of `forward` or `backward` on the call stack",
    follows="torch/utils/checkpoint.py, class CheckpointFunction; torch/csrc/autograd/python_function.cpp",
    without="a recomputation under delayed scaling or outside of its autocast cannot find its forward; use "
    "use_reentrant=False, or layers' own recipes without delayed scaling",
)
has_forward_mode: Callable[[], bool] = private(
    "torch._C._is_fwd_grad_enabled",
    follows="torch/csrc/autograd/python_function.cpp, THPFunction_apply, which ends it for the time of a forward",
    without="running functions are looked for in every forward",
    fallback=lambda: False,
)
"""Whether derivatives in forward mode are on, which they are not in the forward of an autograd function."""
set_versions: Callable[[Sequence[Tensor], Sequence[int]], None] = private(
    "torch._C._autograd._unsafe_set_version_counter",
    follows="torch/autograd/grad_mode.py, _unsafe_preserve_version_counter",
    without="use a tested release: a backward would refuse the amax that its forward has changed",
)
"""Give tensors the numbers that their version counters had: a write in between is not counted."""
_queue_callback: Any = private(
    "torch.autograd.Variable._execution_engine.queue_callback",
    follows="torch/csrc/autograd/python_engine.cpp; FSDP2 ends its backward with it",
    without="the state is put back when it is used next",
    fallback=None,
)


def is_in_backward() -> bool:
    """Return whether a backward runs in this thread: a forward that runs now is a recomputation."""
    return graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward that runs now ends; do nothing on a release that offers no such call."""
    if _queue_callback is not None:
        _queue_callback(function)


class version_preserved:
    """A context whose writes the version counters of these tensors do not count.

    A backward that was given one of them runs, though it was written to: what was written is none of its operands.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(x for x in tensors if not x.is_inference())

    def __enter__(self) -> None:
        self.versions = tuple(map(version_of, self.tensors))

    def __exit__(self, *exception: Any) -> None:
        if self.tensors:
            set_versions(self.tensors, self.versions)


Running = tuple[Any, Any]
"""An object that PyTorch makes for each forward of a recomputed function, and which run this is: None the first."""


def running_checkpoints() -> list[Running]:
    """Return the non-reentrant checkpoints whose function runs now, outermost first.

    Raises:
        UpstreamError: hooks for saved tensors are in force, and this release keeps a checkpoint's forward in a way that
            is not known here, so that one could be missed.
    """
    if not _are_hooks_enabled() or _top_hooks(True) is None:
        return []
    hooks = _hooks_in_force()
    if not _succeeds(_finds_checkpoints, torch.utils.checkpoint.checkpoint, _names_of_hooks()):
        raise _CHECKPOINT_HOOKS.error()
    return _checkpoints_of(hooks)


def _names_of_hooks() -> tuple[Any, ...]:
    """Return the structure of a checkpoint: another class needs another probe."""
    return tuple(
        getattr(torch.utils.checkpoint, name, None) for name in ("_checkpoint_hook", "_recomputation_hook")
    )


def _hooks_in_force() -> list[Any]:
    """Return the pairs of hooks in force, outermost first.

    PyTorch shows only the innermost pair; the others by taking it away for a moment.
    """
    hooks: list[Any] = []
    if not _push_hooks:
        _push_hooks()  # raises, before anything is taken away
    if not _are_hooks_enabled():
        return hooks
    collects = gc.isenabled()
    gc.disable()  # a checkpoint that raised ends, before 2.15, where it is collected: here it would not take its pair
    try:
        while (top := _top_hooks(True)) is not None:
            hooks.append(top)
            _pop_hooks()
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)
    finally:
        if collects:
            gc.enable()
    return hooks[::-1]


def innermost_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the pair of hooks, pack and unpack, that gets saved tensors now; None if there is none."""
    return _top_hooks(True) if _are_hooks_enabled() else None  # type: ignore[no-any-return]


_set_hooks_tracing: Any = private(
    "torch._C._autograd._saved_tensors_hooks_set_tracing",
    follows=_HOOKS,
    without="run a model with saved_activations without torch.compile on this release",
)


@contextlib.contextmanager
def traced_hooks() -> Iterator[None]:
    """Call hooks for saved tensors while Dynamo or AOTAutograd traces, which they otherwise ignore."""
    before = _set_hooks_tracing(False)
    try:
        yield
    finally:
        _set_hooks_tracing(before)


def _checkpoints_of(hooks: list[Any]) -> list[Running]:
    found = []
    for pack, _ in hooks:
        pack = inspect.unwrap(pack)
        if getattr(pack, "__module__", None) == torch.utils.checkpoint.__name__:
            held = dict(
                zip(pack.__code__.co_freevars, [cell.cell_contents for cell in pack.__closure__ or ()])
            )
            first = held.get("target_frame_ref")
            found.append((held.get("frame") if first is None else first(), held.get("gid")))
    return [(frame, run) for frame, run in found if frame is not None]


@functools.lru_cache(maxsize=16)
def _succeeds(attempt: Callable[..., bool], *about: Any) -> bool:
    """Return ``attempt(*about)``, once in a process."""
    return attempt(*about)


def _finds_checkpoints(checkpoint: Any, names: tuple[Any, ...]) -> bool:
    """Try a checkpoint out: whether its forward is found in its first run and in its recomputation.

    In a thread of its own no hooks, modes and backwards of the caller are in force.
    """
    seen: list[list[Running]] = []

    def probe(x: Tensor) -> Tensor:
        seen.append(_checkpoints_of(_hooks_in_force()))
        return (x * x).sin()

    def attempt() -> None:
        x = torch.ones(1, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.save_on_cpu():
            y = checkpoint(probe, x, use_reentrant=False)
        y.backward()

    return _one_forward_in(attempt, seen)


def _one_forward_in(attempt: Callable[[], None], seen: list[list[Running]]) -> bool:
    """Return whether ``attempt``, run in a thread, finds one forward: in its first run, then in a recomputation."""
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    if [len(found) for found in seen] != [1, 1]:
        return False
    ((first, of_first),), ((again, of_again),) = seen
    return first is again and of_first is None and of_again not in (None, -1)


def running_functions() -> list[Running]:
    """Return the contexts of the autograd functions that run now, outermost first, such as reentrant checkpoints.

    Libraries and users write checkpoints of their own as functions whose backward runs a forward again. What runs in
    inference mode will not be recomputed.

    Raises:
        UpstreamError: this release calls a function in a way in which its context is not found.
    """
    if not _may_run_functions():
        return []
    if not _succeeds(_finds_functions):
        raise _FUNCTION_FRAMES.error()
    return _functions_of(sys._getframe(1))


def _may_run_functions() -> bool:
    return graph_task_id() != -1 or not (has_forward_mode() or torch.is_inference_mode_enabled())


def _functions_of(caller: Any) -> list[Running]:
    found = []
    while caller is not None:
        code = caller.f_code
        if code.co_name in _RUNS and _may_have_context(code):
            context = caller.f_locals.get(code.co_varnames[0])
            if isinstance(context, BackwardCFunction):
                found.append((context, graph_task_id() if code.co_name == "backward" else None))
        caller = caller.f_back
    return found[::-1]


_RUNS = ("forward", "backward")
_NOT_RECOMPUTED = (
    os.path.join(os.path.dirname(torch.__file__), "_functorch", ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "autograd", ""),
)
"""Files whose autograd functions run graphs and layers, and repeat nobody's forward."""


@functools.cache
def _may_have_context(code: Any) -> bool:
    """Return whether code named forward or backward may be an autograd function's: no method of a module."""
    takes_one = bool(code.co_argcount) and code.co_varnames[0] != "self"
    return takes_one and not code.co_filename.startswith(_NOT_RECOMPUTED)


def _finds_functions() -> bool:
    """Try a reentrant checkpoint out: whether one context is found in both of its runs, and that it has a backward."""
    seen: list[list[Running]] = []
    recorded = []

    def probe(x: Tensor) -> Tensor:
        seen.append(_functions_of(sys._getframe(1)) if _may_run_functions() else [])
        recorded.append(bool(seen[-1]) and records_gradients(seen[-1][0][0]))
        return x * x

    def attempt() -> None:
        x = torch.ones(1, requires_grad=True)
        with torch.enable_grad():
            y = torch.utils.checkpoint.checkpoint(probe, x, use_reentrant=True)
        y.backward()  # type: ignore[union-attr]

    return _one_forward_in(attempt, seen) and recorded[0]


def records_gradients(context: Any) -> bool:
    """Return whether a running function will have a backward; under ``no_grad`` ``needs_input_grad`` does not tell."""
    return bool(context.next_functions)
