"""``narrowcast.distributed.async_tensor_parallel``: what it refuses, what PyTorch's pass finds in layers' graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

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
from narrowcast.autograd.linear import LinearFunction
from narrowcast.distributed.micro_pipeline import _AsWritten

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
