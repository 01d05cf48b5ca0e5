"""Which operators a compiled graph holds as launches and GEMMs of its own, and which it keeps whole."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

TRACED = """
import os
from unittest.mock import patch
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy
import narrowcast as nc
from narrowcast import _device, kernels
from narrowcast.functional import routes

_device.get_device_compute_capability = lambda: (9, 0)

READ = ("x_ptr", "operand_0", "scale_ptr", "amax_ptr", "sums_ptr", "starts_ptr")
wrap.get_mutated_tensors = lambda *, kwargs, **_: [name for name in kwargs if name not in READ]
ops = torch.ops.narrowcast
quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)


def graph_of(function, device="cuda", mode=None, rows=128):
    with FakeTensorMode():
        x = torch.empty(rows, 256, dtype=torch.bfloat16, device=device)
    wrapped = dispatch_functionalize(function, mode or FunctionalTensorMode())
    return make_fx(wrapped, tracing_mode="fake")(x).graph


def traced(function, device="cuda", mode=None, rows=128):
    return {str(node.target) for node in graph_of(function, device, mode, rows).nodes if node.op == "call_function"}


def launches(function):
    nodes = graph_of(function).nodes
    return [node for node in nodes if node.target is wrap.triton_kernel_wrapper_functional]


def multiply(x, emulate=False):
    a = ops.quantize(x, quantizer.with_usage(columnwise=False))
    return ops.gemm("fprop", a, quantizer, a, quantizer, None, torch.bfloat16, 128, 128, True, emulate)


def whole(targets):
    return {target for target in targets if target.startswith("narrowcast.")}


targets = traced(lambda x: ops.quantize(x, quantizer), rows=512)
assert not whole(targets) and "aten.amax.default" in targets, targets  # for the compiler to take where x is written
assert "aten.amax.default" not in traced(lambda x: ops.quantize(x, quantizer))  # of few elements the cast finds it
assert len(launches(lambda x: ops.quantize(x, quantizer))) == 1
assert not whole(traced(lambda x: ops.act_quantize(x, "swiglu", quantizer)))


def adam(x, count=3):
    kept = [[x.float()] for _ in range(3)]
    stored = (None, x.new_ones(()), None, None)
    options = (*stored, 1e-3, count, [0.9, 0.95], 1e-8, 0.1, True, True, False)
    ops.adam_(kept[0], [x], *kept[1:], [x.clone()], [], *options)
    return [tensor for (tensor,) in kept]


assert not whole(traced(adam)) and len(launches(adam)) == 2
targets = traced(multiply)
assert not whole(targets) and "aten._scaled_mm.default" in targets, targets
assert whole(traced(lambda x: multiply(x, emulate=True))) == {"narrowcast.gemm.default"}
with torch._inductor.config.patch(max_autotune=True):  # whose kernels have bits of their own
    assert whole(traced(multiply)) == {"narrowcast.gemm.default"}
assert whole(traced(lambda x: ops.quantize(x, quantizer), device="cpu")) == {"narrowcast.quantize.default"}
shapes = ShapeEnv()
with FakeTensorMode(shape_env=shapes), FunctionalTensorMode():
    unknown = shapes.create_unbacked_symint()
    for rows, row, static in ((128, 256, True), (unknown, 256, False), (128, unknown, False)):
        x = FunctionalTensor.to_functional(torch.empty_strided((rows, 256), (row, 1), device="cuda"))
        assert routes._is_static_on_gpu([x, [x], "fprop"]) == static
exporting = FunctionalTensorMode(export=True)
assert whole(traced(lambda x: ops.quantize(x, quantizer), mode=exporting)) == {"narrowcast.quantize.default"}
assert torch._inductor.config.static_launch_user_defined_triton_kernels  # by default, once a graph holds kernels
with torch._inductor.config.patch(static_launch_user_defined_triton_kernels=False):
    traced(multiply)
    assert not torch._inductor.config.static_launch_user_defined_triton_kernels
# a cast of what was never seen is one launch, too
def first(x):
    scale, amax = (x.new_zeros(2, dtype=torch.float32) for _ in range(2))
    return ops.quantize(x, nc.quantizers.DelayedFloat8Quantizer(nc.DType.kFloat8E4M3, 1, -448.0), None, scale, amax)[0]


assert len(launches(first)) == 1 and not whole(traced(first))
# readers of one input share its quantization, unless it was written to, or they hand the codes to a user
once = len(launches(lambda x: ops.quantize_operand(x, quantizer)))


def twice(operator, written=False, quantizers=(quantizer, quantizer)):
    def run(x):
        first = operator(x.view(64, 512), quantizers[0])
        x = x.add_(1) if written else x
        return [a.view(torch.int8) + 1 for a in (first[0], operator(x.view(64, 512), quantizers[1])[0])]

    return run


assert len(launches(twice(ops.quantize_operand))) == once
assert len(launches(twice(ops.quantize))) == 2 * once
assert len(launches(twice(ops.quantize_operand, written=True))) == 2 * once
rowwise = quantizer.with_usage(columnwise=False)
assert len(launches(twice(ops.quantize_operand, quantizers=(quantizer, rowwise)))) == 2 * once
# the amax of a gradient is taken by the kernel that writes it, and holds until it is written to
def after_its_kernel(change, asks=quantizer):
    def run(x):
        q, k, table = x.view(2, 128, 8, 64), x.new_empty(2, 128, 2, 64), x.new_ones(128, 64, dtype=torch.float32)
        before = ops.quantize(x, asks)
        dqkv = ops.rotate_qkv_backward([q, k, k], [table] * 4, None, False, False, False)
        after = ops.quantize(change(dqkv).view(256, -1), quantizer)
        return [a.view(torch.int8) + 1 for a in (before[0], after[0])]

    nodes = [str(node.target) for node in graph_of(run, rows=512).nodes]
    return nodes.count("aten.abs.default")


block = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=True)
assert after_its_kernel(lambda dqkv: dqkv) == 1  # that of what is quantized before
assert after_its_kernel(lambda dqkv: dqkv.add_(1)) == after_its_kernel(lambda dqkv: dqkv + 1) == 2
assert after_its_kernel(lambda dqkv: dqkv, asks=block) == 1  # nothing had asked for it
# what a launch reads is computed once, for all of its readers
for node in launches(lambda x: ops.quantize(x * 2, quantizer)):
    read = [given for name, given in node.kwargs["kwargs"].items() if name in ("x_ptr", "operand_0", "sums_ptr")]
    assert read and all(one.target is torch.ops.aten.as_strided.default for one in read), node
# what Dynamo records are the overloads that this holds for; those with texts are exported ones
held = set()
layer = nc.Linear(32, 32, device="cpu", recipe=nc.recipe.Float8CurrentScaling())


def backend(graph, inputs):
    held.update(str(node.target) for node in graph.graph.nodes)
    return graph


torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(torch.randn(32, 32, requires_grad=True))
assert "narrowcast.gemm.default" in held and not any("text" in target for target in held), held
os.environ["NARROWCAST_INLINE"] = "0"
assert whole(traced(multiply)) == {"narrowcast.quantize.default", "narrowcast.gemm.default"}
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_what_a_graph_holds() -> None:
    """On fake CUDA tensors, without any GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
