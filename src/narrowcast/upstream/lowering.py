"""Lowerings of Inductor: an operator that a graph holds becomes the nodes of a graph of its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from .private import entry
from .tensors import storage_key, tree_leaves, tree_map_only

_WITHOUT = "graphs keep operators whole, with the same bits at a higher cost to the host"


def _of_inductor(name: str, file: str) -> Any:
    return entry(
        f"torch._inductor.{name}", follows=f"torch/_inductor/{file}", without=_WITHOUT, falls_back=True
    )


_REGISTER, _KEEP, _CONSTRAIN = (
    _of_inductor(f"lowering.{name}", "lowering.py; graph.py GraphLowering.call_function")
    for name in ("register_lowering", "fallback_handler", "constrain_to_fake_tensors")
)
_RUN = _of_inductor("graph.GraphLowering.run_node", "graph.py; lowering.py process_subgraph_nodes")
_VIRTUALIZED = _of_inductor("virtualized.V", "virtualized.py; graph.py GraphLowering.run_node")
_DECOMPOSITIONS = _of_inductor("decomposition.select_decomp_table", "decomposition.py; compile_fx.py")
_WRAP = "torch._higher_order_ops.triton_kernel_wrap"
_LAUNCH = entry(
    f"{_WRAP}.triton_kernel_wrapper_mutation",
    follows="torch/_higher_order_ops/triton_kernel_wrap.py",
    without=_WITHOUT,
    falls_back=True,
)
_USED = (_LAUNCH, _REGISTER, _KEEP, _CONSTRAIN, _RUN, _VIRTUALIZED, _DECOMPOSITIONS)


def is_inductor_loaded() -> bool:
    """Return whether anything can be lowered in this process."""
    return "torch._inductor.lowering" in sys.modules


def fakes_of(nodes: Any) -> Any:
    """Return the same with fake tensors for nodes."""
    return tree_map_only(fx.Node, lambda node: node.meta.get("val", node), nodes)


class Call:
    """An operator of a graph that Inductor is lowering.

    ``given``: the arguments, with fake tensors. ``values``: what Inductor has for each of these tensors. ``kept``: what
    was kept in the lowering of this graph, by any name.
    """

    def __init__(self, keep_whole: Callable[..., Any], args: Any, kwargs: Any) -> None:
        graph = _VIRTUALIZED.take().graph
        node = graph.current_node
        self._args, self._node = (args, kwargs), node
        self.given = fakes_of((*node.args, *node.kwargs.values()))
        self.values = [x for x in tree_leaves((args, list(kwargs.values()))) if hasattr(x, "realize")]
        self._kernel = keep_whole
        self.kept: dict[str, Any] = vars(graph).setdefault("_narrowcast_kept", {})
        self._graph = graph

    def keep_whole(self) -> Any:
        """Return what Inductor has for the outputs of the operator itself, with arguments as in eager code."""
        args, kwargs = self._args
        strides = self._node.meta.get("eager_input_vals")
        if strides is not None:
            args, kwargs = _CONSTRAIN.take()(args, kwargs, *strides)
        return self._kernel(*args, **kwargs)

    def run(self, graph: fx.Graph, values: list[Any]) -> Any:
        """Return what Inductor has for the outputs of a graph, for ``values`` in the places of its inputs."""
        for value in values:
            value.realize()  # or each launch that reads it would compute it
        own, rest, found = fx.Graph(), iter(values), self._graph.env
        own.output(own.graph_copy(graph, {}))  # Inductor runs a node once
        *nodes, output = own.nodes
        for node in nodes:
            found[node] = next(rest) if node.op == "placeholder" else self._graph.run_node(node)
            if node.meta.get(_IN_MEMORY):
                found[node].realize()
        return tree_map_only(fx.Node, found.__getitem__, output.args[0])

    def memory(self, value: Any) -> str | None:
        """Return the name of the memory of a value, None if that is written to."""
        value.realize()
        name = value.get_name()
        return None if name in self._graph.mutated_buffers else name


def trace(function: Callable[..., Any], fakes: list[Tensor]) -> fx.Graph:
    """Return the graph of a function of fake tensors, in what Inductor lowers."""
    with fakes[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return make_fx(function, decomposition_table=_DECOMPOSITIONS.take()())(*fakes).graph


_WRITTEN, _IN_MEMORY = "narrowcast_written", "narrowcast_in_memory"
_SLOWLY = "graphs compile more slowly, since Triton translates each kernel to find what it writes to"
_FINDS_WRITTEN = entry(
    f"{_WRAP}.identify_mutated_tensors",
    follows="torch/_inductor/ir.py UserDefinedTritonKernel",
    without=_SLOWLY,
    falls_back=True,
    tried="2.11-2.11",
)
_FINDS_ACCESSES, _ACCESSES, _READS_AND_WRITES, _WHOLE, _SET = (
    entry(
        name,
        follows="torch/_inductor/ir.py UserDefinedTritonKernel",
        without=_SLOWLY,
        falls_back=True,
        tried="2.13-",
    )
    for name in (
        f"{_WRAP}.identify_accessed_tensors",
        f"{_WRAP}.TensorAccesses",
        "torch._inductor.dependencies.ReadWrites",
        "torch._inductor.dependencies.StarDep",
        "torch.utils._ordered_set.OrderedSet",
    )
)


def tell_writes(graph: fx.Graph, read: set[int]) -> None:
    """Note at each launch of a graph which arguments it may write to: those whose storage is not only ``read``.

    To find out, Inductor would translate each kernel to Triton's intermediate code, which takes longer than anything
    else in a compilation. And what is written to must be in memory before any part of it is an argument: Inductor would
    hand on a copy of the part.
    """
    makers: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.target is not _LAUNCH.take():
            for x in tree_leaves(fakes_of(node)):
                if isinstance(x, Tensor):
                    makers.setdefault(storage_key(x), node)
            continue
        given = {name: x for name, x in fakes_of(node.kwargs["kwargs"]).items() if isinstance(x, Tensor)}
        written = {name: storage_key(x) for name, x in given.items() if storage_key(x) not in read}
        node.meta[_WRITTEN] = [*written]
        for key in written.values():
            makers[key].meta[_IN_MEMORY] = True


def hear_writes() -> None:
    """Have Inductor take what :func:`tell_writes` notes."""
    found = next(filter(None, (one.take_or(None) for one in (_FINDS_WRITTEN, _FINDS_ACCESSES))), None)
    if found is None or hasattr(found, "__wrapped__"):
        return
    as_accesses = found is _FINDS_ACCESSES.take_or(None)
    parts = [one.take_or(None) for one in (_ACCESSES, _READS_AND_WRITES, _WHOLE, _SET)]
    if as_accesses and not all(parts):
        return

    @functools.wraps(found)
    def find(kernel: Any, kwargs: dict[str, Any], *descriptors: Any) -> Any:
        node = getattr(_VIRTUALIZED.take().graph, "current_node", None)
        written = None if node is None else node.meta.get(_WRITTEN)
        if written is None:
            return found(kernel, kwargs, *descriptors)
        if not as_accesses:
            return [*written]
        accesses, reads_and_writes, whole, ordered = parts
        tensors = [name for name, value in kwargs.items() if hasattr(value, "realize")]
        reads, writes = (ordered(whole(name) for name in names) for names in (tensors, written))
        return accesses(reads_and_writes(reads, writes, ordered()), can_fuse_epilogue=False)

    setattr(sys.modules[_WRAP], found.__name__, find)


def register(overload: Any, rule: Callable[[Call], Any]) -> None:
    """Have Inductor lower an operator by a rule, in this process."""
    if all(one.take_or(None) for one in _USED):
        keep_whole = _KEEP.take()(overload, add_to_fallback_set=False)
        _REGISTER.take()(overload, type_promotion_kind=None)(
            lambda *args, **kwargs: rule(Call(keep_whole, args, kwargs))
        )
