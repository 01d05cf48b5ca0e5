"""Table of the routes that an operator's call may take, and the two functions that choose one.

A route is chosen when the operator is called (:func:`watcher`), and in a graph again where that is functionalized
(:func:`watcher_in_graph`). Every route gives the same bits. They differ in what the host pays for and in what the one
who watches gets to see. docs/architecture-call.md explains the table.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._environment import read_flag
from ..upstream.autograd import forward_level
from ..upstream.functionalization import is_export
from ..upstream.tensors import count_modes, is_autocast, is_exporting, is_profiled

SHORTCUT = "shortcut"
"""The implementation is called as it is, where its tensors are plain memory of a GPU; else dispatched."""
SHIELDED = "shielded"
"""The same, with ``torch.autocast`` off meanwhile."""
DISPATCHED = "dispatched"
"""The overload is called; in code that is traced it is a node of the graph."""
TEXT = "text"
"""The overload ``text`` is called, which has texts for quantizers and dtypes; dispatched, if there is none."""
WHOLE = "whole"
"""The graph keeps the operator."""
DISSOLVED = "dissolved"
"""The implementation is traced, and the graph has its launches and GEMMs instead of the operator."""
LOWERED = "lowered"
"""The same, when Inductor lowers a graph that held the operator."""
SAVED = "saved"
"""The operator's node is tagged, so that the backward never repeats it; for operators defined so."""
RECORDED = "recorded"
"""The implementation runs, and its allocations and launches become lines of a recording."""


class Watcher(NamedTuple):
    """The observer of a call.

    Args:
        name: in the words of docs/architecture-call.md.
        operator: the route of an operator's call.
        replays: whether a stage of several operators is replayed, instead of running itself.
    """

    name: str
    operator: str
    replays: bool = False


NOBODY = Watcher("nobody: eager code that records no gradients", SHORTCUT, True)
AUTOCAST = Watcher("`torch.autocast` in such code", SHIELDED)
AUTOGRAD = Watcher("autograd, which records gradients", DISPATCHED)
MODES = Watcher("dispatch modes, or a profiler", DISPATCHED)
GRAPH = Watcher("Dynamo", DISPATCHED)
EXPORT = Watcher("`torch.export`", TEXT)
RECORDING = Watcher("the recording of a stage", RECORDED)
CHECKPOINT = Watcher("a checkpoint in a graph", SAVED)
STATIC = Watcher("functionalization of GEMMs and optimizers, static shapes on a GPU", DISSOLVED)
INDUCTOR = Watcher("Inductor, static shapes on a GPU", LOWERED)
DECOMPOSITION = Watcher("`nc.decompose`", DISSOLVED)
GENERAL = Watcher("functionalization of anything else, or for export", WHOLE)

TABLE = (
    NOBODY,
    AUTOCAST,
    AUTOGRAD,
    MODES,
    GRAPH,
    EXPORT,
    RECORDING,
    CHECKPOINT,
    STATIC,
    INDUCTOR,
    DECOMPOSITION,
    GENERAL,
)
"""Every watcher, in the order of the page. The recording and the checkpoint are modes, which PyTorch finds itself."""


def watcher(of_state: bool = False) -> Watcher:
    """Return who watches what is called now; a constant in code that is traced.

    Args:
        of_state: the tensors never have gradients, so that it does not matter whether any are recorded.
    """
    if is_dynamo_compiling():
        return EXPORT if is_exporting() else GRAPH
    return eager_watcher(of_state)


def eager_watcher(of_state: bool = False) -> Watcher:
    """Return :func:`watcher` where Dynamo traces nothing."""
    if count_modes() or is_profiled():
        return EXPORT if is_exporting() else MODES  # torch.export may trace without Dynamo
    if (torch.is_grad_enabled() and not of_state) or forward_level() >= 0:
        return AUTOGRAD
    return AUTOCAST if is_autocast() else NOBODY


def watcher_in_graph(mode: Any, given: tuple[Any, ...], dissolved: Callable[..., bool] | None) -> Watcher:
    """Return who meets an operator while ``mode`` functionalizes a graph.

    Args:
        given: the operator's arguments.
        dissolved: given these, says whether it may be dissolved; None: it may not.
    """
    if _TAKING_APART.get():
        return DECOMPOSITION
    if dissolved is None or is_export(mode):
        return GENERAL
    return STATIC if _is_inlined(given, dissolved) else GENERAL


def watcher_of_lowering(given: tuple[Any, ...], lowered: Callable[..., bool]) -> Watcher:
    """Return who meets an operator while Inductor lowers a graph; arguments as of :func:`watcher_in_graph`."""
    return INDUCTOR if _is_inlined(given, lowered) else GENERAL


def _is_inlined(given: tuple[Any, ...], wanted: Callable[..., bool]) -> bool:
    return is_static_on_gpu(given) and read_flag("INLINE", True) and wanted(*given)


_TAKING_APART = contextvars.ContextVar("taking_apart", default=False)


@contextlib.contextmanager
def taking_apart() -> Iterator[None]:
    """Functionalization leaves none of the library's operators whole, be the graph one to export or on a CPU."""
    token = _TAKING_APART.set(True)
    try:
        yield
    finally:
        _TAKING_APART.reset(token)


def is_static_on_gpu(given: tuple[Any, ...]) -> bool:
    """Return whether all numbers and the tensors' shapes are known, and the tensors on a GPU."""
    return not any(isinstance(value, torch.SymInt) for value in given) and all(
        x.is_cuda and all(isinstance(size, int) for size in (*x.shape, *x.stride(), x.storage_offset()))
        for x in tensors_among(given)
    )


def tensors_among(given: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of an operator's arguments, those in lists as well."""
    values = [x for value in given for x in (value if isinstance(value, (list, tuple)) else (value,))]
    return [x for x in values if isinstance(x, Tensor)]
