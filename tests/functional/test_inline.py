"""Which operators a compiled graph holds as GEMMs and launches of its own, from when on, and which it keeps whole."""

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
from narrowcast.functional._library import always
from narrowcast.functional.lowering import RULES
from narrowcast.upstream.tensors import tree_leaves

_device.get_device_compute_capability = lambda: (9, 0)

READ = ("x_ptr", "operand_0", "scale_ptr", "amax_ptr", "sums_ptr", "starts_ptr")
wrap.get_mutated_tensors = lambda *, kwargs, **_: [name for name in kwargs if name not in READ]
ops = torch.ops.narrowcast
fakes = FakeTensorMode()
quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)


def fake(*shape, dtype=torch.bfloat16, device="cuda"):
    with fakes:
        return torch.empty(shape, dtype=dtype, device=device)


# what a functionalized graph calls
def traced(function, device="cuda", mode=None):
    wrapped = dispatch_functionalize(function, mode or FunctionalTensorMode())
    graph = make_fx(wrapped, tracing_mode="fake")(fake(128, 256, device=device)).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


# what Inductor takes in its place
def lowered(operator, *given, known=None, wanted=False):
    return RULES[operator.default].launches(given, known, wanted)


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def launches(graph):
    return targets(graph).count("triton_kernel_wrapper_mutation")


def multiply(x, emulate=False):
    a = ops.quantize(x, quantizer.with_usage(columnwise=False))
    return ops.gemm("fprop", a, quantizer, a, quantizer, None, torch.bfloat16, 128, 128, True, emulate)


def whole(targets):
    return {target for target in targets if target.startswith("narrowcast.")}


# until Inductor lowers it, a graph has the operator
assert whole(traced(lambda x: ops.quantize(x, quantizer))) == {"narrowcast.quantize.default"}
large, small = fake(512, 256), fake(128, 256)
graph, _, asked = lowered(ops.quantize, large, quantizer)
assert launches(graph) == 1 and asked and not whole(targets(graph))
assert "aten.amax.default" in targets(graph)  # for the compiler to take where x is written
graph, _, asked = lowered(ops.quantize, small, quantizer)
assert launches(graph) == 1 and not asked and "aten.amax.default" not in targets(graph)  # the cast finds it
assert not whole(targets(lowered(ops.act_quantize, small, "swiglu", quantizer).graph))


def adam(x, count=3):
    kept = [[x.float()] for _ in range(3)]
    stored = (None, x.new_ones(()), None, None)
    options = (*stored, 1e-3, count, [0.9, 0.95], 1e-8, 0.1, True, True, False)
    ops.adam_(kept[0], [x], *kept[1:], [x.clone()], [], *options)
    return [tensor for (tensor,) in kept]


found = traced(adam)
assert not whole(found) and found.count("triton_kernel_wrapper_functional") == 2
assert torch._inductor.config.static_launch_user_defined_triton_kernels  # by default, once a graph holds kernels
with torch._inductor.config.patch(static_launch_user_defined_triton_kernels=False):
    traced(adam)
    assert not torch._inductor.config.static_launch_user_defined_triton_kernels
quantized = "narrowcast.quantize.default"
found = traced(multiply)
assert whole(found) == {quantized} and "aten._scaled_mm.default" in found, found
assert whole(traced(lambda x: multiply(x, emulate=True))) == {quantized, "narrowcast.gemm.default"}
with torch._inductor.config.patch(max_autotune=True):  # whose kernels have bits of their own
    assert whole(traced(multiply)) == {quantized, "narrowcast.gemm.default"}
exporting = FunctionalTensorMode(export=True)
assert whole(traced(multiply, mode=exporting)) == {quantized, "narrowcast.gemm.default"}
shapes = ShapeEnv()
with FakeTensorMode(shape_env=shapes), FunctionalTensorMode():
    unknown = shapes.create_unbacked_symint()
    for rows, row, static in ((128, 256, True), (unknown, 256, False), (128, unknown, False)):
        x = FunctionalTensor.to_functional(torch.empty_strided((rows, 256), (row, 1), device="cuda"))
        for given in (x, x.from_functional()):
            assert routes.is_static_on_gpu([given, [given], "fprop"]) == static
inductor, general = routes.INDUCTOR, routes.GENERAL
assert routes.watcher_of_lowering((small, quantizer), always) is inductor
assert routes.watcher_of_lowering((fake(128, 256, device="cpu"), quantizer), always) is general
assert routes.watcher_of_lowering((small, quantizer), lambda *_: False) is general
# a cast of what was never seen is one launch, too
delayed = nc.quantizers.DelayedFloat8Quantizer(nc.DType.kFloat8E4M3, 1, -448.0)
scale, amax = (fake(2, dtype=torch.float32) for _ in range(2))
graph = lowered(ops.quantize, small, delayed, None, scale, amax).graph
assert launches(graph) == 1 and not whole(targets(graph))


# readers of one input share its quantization, unless it was written to, or they hand the codes to a user
def twice(operator, written=False, quantizers=(quantizer, quantizer)):
    def run(x):
        first = operator(x.view(64, 512), quantizers[0])
        x = x.add_(1) if written else x
        return [a.view(torch.int8) + 1 for a in (first[0], operator(x.view(64, 512), quantizers[1])[0])]

    return len([target for target in traced(run) if target.startswith("narrowcast.")])


assert twice(ops.quantize_operand) == 1
assert twice(ops.quantize) == twice(ops.quantize_operand, written=True) == 2
rowwise = quantizer.with_usage(columnwise=False)
assert twice(ops.quantize_operand, quantizers=(quantizer, rowwise)) == 2
# the amax of a gradient is taken by the kernel that writes it, if a tensor before needed one
q, k, table = fake(2, 128, 8, 64), fake(2, 128, 2, 64), fake(128, 64, dtype=torch.float32)
backward = ops.rotate_qkv_backward, [q, k, k], [table] * 4, None, False, False, False
assert lowered(*backward).made == []
taken = lowered(*backward, wanted=True)
assert taken.made == [0] and "aten.abs.default" not in targets(taken.graph)
maxima = fake(256, dtype=torch.float32)
for given, known in ((large, {0: maxima}), (large, {}), (large.t(), {0: maxima})):
    operator = (ops.quantize, given, quantizer)
    assert ("aten.abs.default" in targets(lowered(*operator, known=known).graph)) == (given is not large or not known)


# calls of one graph, whose memory has names
class Call:
    kept = {}
    keep_whole = staticmethod(lambda: "whole")

    def __init__(self, given, values, mutated=()):
        self.given, self.values, self.mutated = given, values, mutated

    def memory(self, value):
        return None if value in self.mutated else value

    def run(self, graph, values):
        self.read = values
        results, taken = graph.output_node().args[0]
        results = [f"result {at}" for at in range(len(tree_leaves(results)))]
        return results, [f"maxima {at}" for at in range(len(taken))]


def run(operator, *given, values, mutated=()):
    call = Call(given, values, mutated)
    call.results = RULES[operator.default](call)
    return call


parts = ["q", "k", "v", *(f"table {at}" for at in range(4))]
run(*backward, values=parts)
assert Call.kept["maxima"] == {}  # nothing had asked for any
block = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=True)
run(ops.quantize, large, block, values=["x"])
run(*backward, values=parts)
assert Call.kept["maxima"] == {} and len(Call.kept["traced"]) == 2  # equal calls are traced once
run(ops.quantize, large, quantizer, values=["x"])
run(*backward, values=parts)
assert list(Call.kept["maxima"]) == ["result 0"]
dqkv = fake(256, 768)
assert run(ops.quantize, dqkv, quantizer, values=["result 0"]).read == ["result 0", "maxima 0"]
assert run(ops.quantize, dqkv, quantizer, values=["another"]).read == ["another"]
assert run(ops.quantize, dqkv, quantizer, values=["result 0"], mutated=["result 0"]).read == ["result 0"]
cpu = fake(256, 768, device="cpu")
assert run(ops.quantize, cpu, quantizer, values=["x"]).results == "whole"
# what Dynamo records are the overloads that this holds for; those with texts are exported ones
held = set()
layer = nc.Linear(32, 32, device="cpu", recipe=nc.recipe.Float8CurrentScaling())


def backend(graph, inputs):
    held.update(str(node.target) for node in graph.graph.nodes)
    return graph


torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(torch.randn(32, 32, requires_grad=True))
assert "narrowcast.gemm.default" in held and not any("text" in target for target in held), held
os.environ["NARROWCAST_INLINE"] = "0"
assert whole(traced(multiply)) == {quantized, "narrowcast.gemm.default"}
assert run(ops.quantize, large, quantizer, values=["x"]).results == "whole"
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_what_a_graph_holds() -> None:
    """On fake CUDA tensors, without any GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
