"""Private names of autograd and ``torch.utils.checkpoint``: running backwards, hooks, versions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from .private import private
from .tensors import version_of

_GRAPH_TASKS = "torch/csrc/autograd/python_engine.cpp"
_HOOKS = "torch/csrc/autograd/saved_variable_hooks.h and torch/autograd/graph.py, saved_tensors_hooks"

graph_task_id: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    follows=_GRAPH_TASKS,
    without="a recomputation is not told from a forward; use a tested release",
)
"""The number of the backward that runs in this thread; -1 outside any. Dynamo cannot trace it."""

_engine: Any = private(
    "torch.autograd.variable.Variable._execution_engine",
    follows="torch/autograd/variable.py",
    without="use a tested release: a recomputation would change the recipe that a step renews by",
)


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Call this once the backward that runs in this thread has ended."""
    _engine.queue_callback(call)


_are_hooks_enabled: Callable[[], bool] = private(
    "torch._C._autograd._saved_tensors_hooks_is_enabled",
    follows=_HOOKS,
    without="the hooks are looked for all the same",
    fallback=lambda: True,
)
_top_hooks: Any = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    follows=_HOOKS,
    without="run a model with saved_activations without hooks for saved tensors around it on this release",
)

set_versions: Callable[[Sequence[Tensor], Sequence[int]], None] = private(
    "torch._C._autograd._unsafe_set_version_counter",
    follows="torch/autograd/grad_mode.py, _unsafe_preserve_version_counter",
    without="use a tested release: a backward would refuse what was written since its forward",
)
"""Give tensors the numbers that their version counters had: a write in between is not counted."""

_LEVEL = private(
    "torch.autograd.forward_ad._current_level",
    without="every operator looks for tangents, which takes the host longer",
    fallback=None,
)
forward_level: Callable[[], int] = (
    (lambda: 0)
    if _LEVEL is None
    else functools.partial(vars(torch.autograd.forward_ad).__getitem__, "_current_level")
)
"""Return the level of forward-mode AD that is entered, -1 for none; it takes no frame of Python."""


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of these has a tangent at the level of forward-mode AD that is entered."""
    return any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_in_backward() -> bool:
    """Return whether a backward runs in this thread: a forward that runs now is a recomputation."""
    return graph_task_id() != -1


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
