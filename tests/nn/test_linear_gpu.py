"""Linear on an NVIDIA GPU: native FP8 and asked-for emulation against the CPU, odd shapes included."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from recipes import QUANTIZED, RECIPES
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import narrowcast as nc
from narrowcast.testing import assert_close

pytestmark = pytest.mark.gpu

NATIVE = ("delayed", "current", "block")
EMULATED = ("mxfp8", "nvfp4", "custom")


def step(module: nc.Linear, x: Tensor, recipe: nc.recipe.Recipe) -> list[Tensor]:
    x = x.detach().requires_grad_(True)
    with nc.autocast(recipe=recipe):
        y = module(x)
    grads = torch.autograd.grad(y.float().square().sum(), (x, *module.parameters()))
    return [t.detach().float().cpu() for t in (y, *grads)]


def deterministic(name: str) -> nc.recipe.Recipe:
    """The recipe without stochastic rounding, whose seeds come from each device's own generator."""
    if name == "nvfp4":
        return nc.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, emulate=True)
    return QUANTIZED[name]


def both_devices(name: str, tokens: tuple[int, ...], k: int, n: int, steps: int, **kwargs: Any) -> None:
    torch.manual_seed(1)
    on_cpu = nc.Linear(k, n, device="cpu", params_dtype=torch.bfloat16, **kwargs)
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    for seed in range(steps):
        torch.manual_seed(10 + seed)
        x = torch.randn(*tokens, k).bfloat16()
        cpu, gpu = step(on_cpu, x, deterministic(name)), step(on_gpu, x.cuda(), deterministic(name))
        for expected, actual in zip(cpu, gpu, strict=True):
            assert actual.shape == expected.shape and torch.isfinite(actual).all()
            if actual.numel():
                assert_close(actual, expected, "fp8_flips" if name != "nvfp4" else "fp4_layer")


@pytest.mark.parametrize("name", QUANTIZED)
def test_equals_the_cpu(name: str) -> None:
    both_devices(name, (256,), 512, 384, steps=3)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("tokens", [(1,), (7,), (0,), (1000,), (3, 5)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(48, 80), (5, 3), (130, 1), (200, 264)])
def test_no_shape_raises(name: str, tokens: tuple[int, ...], k: int, n: int) -> None:
    both_devices(name, tokens, k, n, steps=1)


@pytest.mark.parametrize("name", EMULATED)
def test_a_recipe_the_gpu_lacks_names_the_fix(name: str) -> None:
    recipe = dataclasses.replace(RECIPES[name], emulate=False)  # type: ignore[type-var]
    module = nc.Linear(64, 64, device="cuda")
    with nc.autocast(recipe=recipe), pytest.raises(RuntimeError, match="emulate=True"):
        module(torch.randn(32, 64, device="cuda"))


@pytest.mark.parametrize("name", NATIVE)
def test_native_recipes_are_reported_as_native(name: str) -> None:
    available = nc.is_fp8_block_scaling_available if name == "block" else nc.is_fp8_available
    answer, reason = available(return_reason=True)
    assert answer and reason == ""


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_natively(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    on_gpu = nc.Linear(128, 256, device="cuda", params_dtype=dtype)
    on_cpu = copy.deepcopy(on_gpu).to("cpu")
    x = torch.randn(64, 128, dtype=dtype)
    for expected, actual in zip(
        step(on_cpu, x, QUANTIZED[name]), step(on_gpu, x.cuda(), QUANTIZED[name]), strict=True
    ):
        assert_close(actual, expected, "fp8_flips")


@pytest.mark.parametrize("name", QUANTIZED)
def test_cuda_graph_capture(name: str) -> None:
    """A captured step replays to the same numbers: no synchronisation, no allocation the graph cannot hold."""
    module = nc.Linear(256, 128, device="cuda", params_dtype=torch.bfloat16)
    recipe = deterministic(name)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def train() -> list[Tensor]:
        with nc.autocast(recipe=recipe, _graph=True):
            y = module(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, module.weight))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_compiled_layers_that_read_one_input_quantize_it_once(name: str) -> None:
    """Delayed scaling has a scale per layer, so there each does; no bit differs from eager code."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        nc.Linear(512, n, bias=False, device="cuda", dtype=torch.bfloat16) for n in (1024, 512, 768)
    )
    nc.set_recipe(layers, QUANTIZED[name])
    twins = copy.deepcopy(layers)  # as they are before their first step
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def forward(layers: torch.nn.ModuleList, x: Tensor) -> list[Tensor]:
        h = x + x  # exact, and the compiler's to compute
        return [layer(h) for layer in layers]

    def numbers(layers: torch.nn.ModuleList, outs: list[Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad([out.float().square().sum() for out in outs], [*layers.parameters()])
        return [*(out.detach() for out in outs), *gradients]

    expected = numbers(layers, forward(layers, x))
    torch.compiler.reset()
    outs, (code, *_) = run_and_get_code(torch.compile(forward, fullgraph=True), twins, x)
    for actual, one in zip(numbers(twins, outs), expected, strict=True):
        assert torch.equal(actual, one)
    launches = len(re.findall(r"_float8_cast_tile_kernel\w*\.run\(", code))
    assert launches == (3 if name == "delayed" else 1), code


@pytest.mark.parametrize("producer", ["pointwise", "norm"])
def test_compiled_current_scaling_reads_what_the_compiler_writes_once(producer: str) -> None:
    """The amax comes out of the kernel that writes the input, a norm's too."""
    layer = nc.set_recipe(nc.Linear(512, 256, device="cuda", dtype=torch.bfloat16), QUANTIZED["current"])
    x = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        h = x + x if producer == "pointwise" else torch.nn.functional.rms_norm(x, (512,))
        return layer(h)

    torch.compiler.reset()
    with torch.no_grad():
        out, (code, *_) = run_and_get_code(torch.compile(forward, fullgraph=True), x)
        if producer == "pointwise":
            assert torch.equal(out, forward(x))
    assert len(re.findall(r"triton_\w+\.run\(", code)) == 2, code  # the other one: the weight's amax
