"""``async_tensor_parallel``: compiled layers that multiply some rows while others are on their way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._checks import shown
from ..functional.collectives import group_name
from ..upstream.c10d import all_gather_op, group_named, reduce_scatter_op, wait_op
from ..upstream.micro_pipeline import (
    GraphPass,
    hash_of_files,
    is_scaled_product,
    is_view,
    set_value,
    start_symmetric_memory,
    turn_on,
    value_of,
)

aten = torch.ops.aten

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def async_tensor_parallel(group: Any = None) -> None:
    """Overlap communication with GEMMs in this group's layers that are compiled after this call.

    PyTorch's micro-pipeline (``torch._inductor.config._micro_pipeline_tp``) does it, in symmetric memory. A gather of
    rows and the GEMM that reads them become one operator, and so do a GEMM and the scatter of its result. It handles
    the GEMMs of per-tensor FP8 and of bf16; layers need ``sequence_parallel=True``. Graphs of other recipes and of
    ``max_autotune`` stay unchanged. Gathered rows have the same bits; partial results are added in bf16, in rank order.

    Args:
        group: a process group over GPUs of one host, or its name; None for the default group. Every rank must call
            this.
    Raises:
        RuntimeError: the group has no symmetric memory, or another graph pass occupies its place; the message says why.
    """
    name = group_name(group, "group")
    reason = _why_not(name)
    if reason:
        raise RuntimeError(
            f"async_tensor_parallel: {reason}; compiled layers keep their collectives as they are"
        )
    if turn_on(_AsWritten(), _AsWritten):
        raise RuntimeError(
            "async_tensor_parallel: torch._inductor.config.post_grad_custom_pre_pass is set; graphs must be rewritten "
            "there before PyTorch's pass sees them"
        )


def _why_not(group: str | None) -> str:
    """Return the obstacle to symmetric memory; "" for none, after it was set up."""
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialized"
    if not torch.cuda.is_available():
        return "it needs CUDA GPUs, and there are none"
    process_group: Any = dist.group.WORLD
    if group is not None:
        process_group = group_named(group)
    backend = dist.get_backend(process_group)
    if "nccl" not in backend:
        return f"the group's backend is {shown(backend)}, it needs 'nccl'"
    try:
        start_symmetric_memory(process_group.group_name)
    except (RuntimeError, ValueError) as error:
        return f"the group's GPUs have no symmetric memory: {error}"
    return ""


class _AsWritten(GraphPass):
    """Brings what layers send into the forms that PyTorch's pass looks for.

    Codes travel as bytes, and a GEMM reads them as FP8; the fused operator multiplies what travels. So they travel as
    FP8 here, which NCCL and copies do not mind. And a result is scattered as the matrix that it is.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target == aten.view.dtype:
                _gather_as_float8(graph, node)
            elif node.target == reduce_scatter_op:
                _scatter_matrix(graph, node)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return the pass's key in caches of compiled graphs."""
        return hash_of_files((__file__,))


def _gather_as_float8(graph: fx.Graph, view: fx.Node) -> None:
    """``view(wait(gather(bytes)), float8)`` becomes ``wait(gather(view(bytes, float8)))``."""
    wait, dtype = view.args
    if dtype not in _FLOAT8 or not isinstance(wait, fx.Node) or wait.target != wait_op:
        return
    gather: Any = wait.args[0]
    if gather.target != all_gather_op:
        return
    shard, *rest = gather.args
    if value_of(shard).dtype != torch.uint8:
        return
    with graph.inserting_before(gather):
        codes = _call(graph, aten.view.dtype, (shard, dtype), value_of(shard).view(dtype))
        begun = _call(graph, gather.target, (codes, *rest), value_of(gather).view(dtype))
    with graph.inserting_before(wait):
        arrived = _call(graph, wait.target, (begun,), value_of(view))
    view.replace_all_uses_with(arrived)
    graph.erase_node(view)
    if (
        wait.users
    ):  # a second reader takes the bytes of the one gather, by a way that the pass takes for no gather
        whole = value_of(wait)
        with graph.inserting_before(wait):
            flat = _call(graph, aten.view.default, (arrived, [whole.numel()]), value_of(arrived).view(-1))
            raw = _call(graph, aten.view.dtype, (flat, torch.uint8), whole.view(-1))
            raw = _call(graph, aten.view.default, (raw, list(whole.shape)), whole)
        wait.replace_all_uses_with(raw)
    graph.erase_node(wait)
    if not gather.users:
        graph.erase_node(gather)


def _scatter_matrix(graph: fx.Graph, scatter: fx.Node) -> None:
    """``wait(scatter(view(product)))`` becomes ``view(wait(scatter(product)))``."""
    view, *rest = scatter.args
    if not isinstance(view, fx.Node) or not is_view(view.target) or len(view.users) > 1:
        return
    product: Any = view.args[0]
    waits = list(scatter.users)
    if not is_scaled_product(product.target) or len(waits) != 1 or waits[0].target != wait_op:
        return
    (wait,) = waits
    rows, features = value_of(product).shape
    part = value_of(scatter).numel() // features
    if value_of(view).shape[-1] != features or rows % part:
        return
    with graph.inserting_before(scatter):
        begun = _call(graph, scatter.target, (product, *rest), value_of(scatter).reshape(part, features))
    with graph.inserting_before(wait):
        arrived = _call(graph, wait.target, (begun,), value_of(wait).reshape(part, features))
        shape = list(value_of(wait).shape)
        shaped = _call(graph, aten.reshape.default, (arrived, shape), value_of(wait))
    wait.replace_all_uses_with(shaped)
    for node in (wait, scatter, view):
        graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
    node = graph.call_function(target, args)
    set_value(node, value)
    return node
