"""``narrowcast.distributed.async_tensor_parallel``: what it refuses, what PyTorch's pass finds in layers' graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

import narrowcast as nc

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

FUSED = """
import sys
from unittest import mock
import torch
import torch.distributed as dist
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.distributed import _symmetric_memory
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
import narrowcast as nc
from narrowcast import _device
from narrowcast.autograd.linear import LinearFunction
from narrowcast.distributed.micro_pipeline import _AsWritten

_device.get_device_compute_capability = lambda: (9, 0)

def written(*, kwargs, **_):
    # what a kernel writes to, which PyTorch finds by compiling it: all but what is passed on in this test
    read = ("data_ptr",) if "x_ptr" not in kwargs and "transpose_ptr" in kwargs else ("operand_0",)
    return [name for name in kwargs if name not in read]


wrap.get_mutated_tensors = written
dist.is_nccl_available = lambda: True
# what a PyTorch without CUDA cannot trace on fake tensors: __getitem__ with a slice, a copy by contiguous
torch.Tensor.__getitem__ = lambda x, index: x.narrow(0, index.start or 0, index.stop)
torch.Tensor.contiguous = lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


class Context:
    def save_for_backward(self, *saved):
        self.saved_tensors = saved


def graph_of(mode, recipe):
    with FakeTensorMode():
        split = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "parallel_mode": mode}
        layer = nc.Linear(
            1024, 1024, bias=False, params_dtype=torch.bfloat16, device="cuda", recipe=recipe, **split
        )
        x = torch.empty(128, 1, layer.weight.shape[1], dtype=torch.bfloat16, device="cuda")
        weight = layer.weight.detach()

    def step(x, weight):
        context, out = Context(), []

        def apply(*args):
            with torch.no_grad():
                out.append(LinearFunction.forward(context, *args))
            return out[0]

        with mock.patch.object(LinearFunction, "apply", apply), torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
            functional_call(layer, {"weight": weight}, (x,))
        with torch.no_grad():
            return out[0], *LinearFunction.backward(context, torch.ones_like(out[0]))[:2]

    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        return make_fx(dispatch_functionalize(step, FunctionalTensorMode()), tracing_mode="fake")(x, weight)


ops = torch.ops.symm_mem
for mode in ("column", "row"):
    for recipe, fused in ((nc.recipe.Float8CurrentScaling(), 1), (nc.recipe.Float8BlockScaling(), 0)):
        module = graph_of(mode, recipe)
        module.graph.eliminate_dead_code()
        _AsWritten()(module.graph)
        with _symmetric_memory._test_mode():
            micro_pipeline_tp_pass(module.graph)
        module.graph.lint()
        gathers = list(module.graph.find_nodes(op="call_function", target=ops.fused_all_gather_scaled_matmul.default))
        scatters = list(
            module.graph.find_nodes(op="call_function", target=ops.fused_scaled_matmul_reduce_scatter.default)
        )
        assert len(gathers) == len(scatters) == fused, (mode, recipe, module.graph)
        for node in gathers:
            codes = node.args[0]  # in the strides of the operator
            assert codes.args[0].meta["val"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_gathers_and_scatters_are_fused_with_per_tensor_gemms() -> None:
    """Forward and backward of both modes, on fake CUDA tensors and a fake group."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", FUSED], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


def graph_of(*inputs: Tensor) -> tuple[fx.Graph, list[fx.Node], Any]:
    """An empty graph, its inputs, and what adds a call to it, with the value that it stands for."""
    graph = fx.Graph()

    def call(target: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    nodes = [graph.placeholder(f"x{index}") for index in range(len(inputs))]
    for node, value in zip(nodes, inputs):
        node.meta["val"] = value
    return graph, nodes, call


def rewritten(graph: fx.Graph) -> list[fx.Node]:
    """The calls after the pass, each with the value that it would have."""
    from narrowcast.distributed.micro_pipeline import _AsWritten

    _AsWritten()(graph)
    graph.lint()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert all(isinstance(node.meta.get("val"), Tensor) for node in calls)
    return calls


@pytest.mark.parametrize("second_reader", [False, True])
def test_codes_are_gathered_as_float8(second_reader: bool) -> None:
    """Of bytes alone, once, also where something reads the gathered bytes."""
    from narrowcast.upstream.c10d import all_gather_op, wait_op

    aten = torch.ops.aten
    shard = torch.arange(12, dtype=torch.uint8).view(3, 4)
    whole = torch.cat([shard, shard])
    for dtype, changes in ((torch.float8_e4m3fn, True), (torch.int8, False)):
        graph, (x,), call = graph_of(shard)
        begun = call(all_gather_op, (x, 2, "group"), whole)
        arrived = call(wait_op, (begun,), whole)
        results = [call(aten.view.dtype, (arrived, dtype), whole.view(dtype))]
        if second_reader:
            results.append(call(aten.t.default, (arrived,), whole.t()))
        graph.output(tuple(results))
        calls = rewritten(graph)
        (gather,) = [node for node in calls if node.target == all_gather_op]
        sent: Any = gather.args[0]
        if not changes:
            assert sent is x
            continue
        assert (sent.target, sent.args, gather.args[1:]) == (aten.view.dtype, (x, dtype), (2, "group"))
        (wait,) = [node for node in calls if node.target == wait_op]
        read: Any = graph.output_node().args[0]
        assert read[0] is wait and wait.args == (gather,)
        assert torch.equal(wait.meta["val"].view(torch.uint8), whole) and wait.meta["val"].dtype == dtype
        assert torch.equal(gather.meta["val"].view(torch.uint8), whole)
        if second_reader:  # of bytes in their own shape, which come from what has arrived
            raw: Any = read[1].args[0]
            assert (raw.target, raw.args[1]) == (aten.view.default, [6, 4])
            assert raw.args[0].args[0].args[0] is wait and torch.equal(raw.meta["val"], whole)


def test_a_gather_of_other_dtypes_and_other_waits_stay() -> None:
    from narrowcast.upstream.c10d import all_gather_op, reduce_scatter_op, wait_op

    wide = torch.zeros(2, 2, dtype=torch.int16)
    for target, value in ((all_gather_op, wide), (reduce_scatter_op, torch.zeros(2, 4, dtype=torch.uint8))):
        graph, (x,), call = graph_of(value)
        begun = call(target, (x, 2, "group"), value)
        arrived = call(wait_op, (begun,), value)
        graph.output(call(torch.ops.aten.view.dtype, (arrived, torch.float8_e5m2), value))
        assert [node.target for node in rewritten(graph)][:2] == [target, wait_op]


def scatter(
    view_to: tuple[int, ...], reads_view: bool = False, product_op: Any = None
) -> tuple[fx.Graph, list[fx.Node]]:
    from narrowcast.upstream.c10d import reduce_scatter_op, wait_op

    product = torch.arange(32.0).view(8, 4)
    graph, (x,), call = graph_of(product)
    out = call(product_op or torch.ops.aten._scaled_mm.default, (x,), product)
    view = call(torch.ops.aten.view.default, (out, list(view_to)), product.view(view_to))
    begun = call(reduce_scatter_op, (view, "sum", 2, "group"), product.view(view_to)[: view_to[0] // 2])
    arrived = call(wait_op, (begun,), begun.meta["val"])
    graph.output((arrived, view) if reads_view else arrived)
    return graph, rewritten(graph)


def test_a_product_is_scattered_as_a_matrix() -> None:
    from narrowcast.upstream.c10d import reduce_scatter_op, wait_op

    aten = torch.ops.aten
    graph, calls = scatter((4, 2, 4))
    assert [node.target for node in calls] == [
        aten._scaled_mm.default,
        reduce_scatter_op,
        wait_op,
        aten.reshape.default,
    ]
    product, begun, arrived, shaped = calls
    assert begun.args == (product, "sum", 2, "group")
    assert shaped.args == (arrived, [2, 2, 4]) and graph.output_node().args[0] is shaped
    assert begun.meta["val"].shape == arrived.meta["val"].shape == (4, 4)
    assert shaped.meta["val"].shape == (2, 2, 4)


@pytest.mark.parametrize(
    "case",
    [
        {"view_to": (4, 2, 4), "reads_view": True},
        {"view_to": (4, 4, 2)},
        {"view_to": (4, 2, 4), "product_op": torch.ops.aten.mm.default},
    ],
    ids=["a second reader", "other features", "another product"],
)
def test_other_scatters_stay(case: dict[str, Any]) -> None:
    from narrowcast.upstream.c10d import reduce_scatter_op

    _, calls = scatter(**case)
    (begun,) = [node for node in calls if node.target == reduce_scatter_op]
    assert begun.args[0].target == torch.ops.aten.view.default  # type: ignore[union-attr]


def test_symmetric_memory_is_set_up_for_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default group, or the one of that name; without memory the reason is said."""
    from narrowcast.distributed import micro_pipeline

    started: list[str] = []
    groups = {None: "all", "mine": "own"}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="all")))
    monkeypatch.setattr(micro_pipeline, "group_name", lambda group, label: group)
    monkeypatch.setattr(micro_pipeline, "group_named", lambda name: SimpleNamespace(group_name=groups[name]))
    monkeypatch.setattr(micro_pipeline, "start_symmetric_memory", started.append)
    monkeypatch.setattr(micro_pipeline, "turn_on", lambda own, cls: False)
    for group in groups:
        nc.distributed.async_tensor_parallel(group)
    assert started == ["all", "own"]

    def none(name: str) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(micro_pipeline, "start_symmetric_memory", none)
    with pytest.raises(RuntimeError, match="have no symmetric memory: no memory; compiled layers keep"):
        nc.distributed.async_tensor_parallel()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    with pytest.raises(RuntimeError, match="not initialized"):
        nc.distributed.async_tensor_parallel()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="needs CUDA GPUs"):
            nc.distributed.async_tensor_parallel()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(RuntimeError, match="backend is 'gloo'"):
            nc.distributed.async_tensor_parallel(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert not config._micro_pipeline_tp and config.post_grad_custom_pre_pass is None
