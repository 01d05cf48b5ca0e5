"""Linear compiled with fullgraph=True equals Linear eager, bit for bit: what test_compile_matrix.py does not have."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import assert_same
from recipes import DEVICE, EMULATE, QUANTIZED, RECIPES, kinds
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc

K, N = 48, 80  # not multiples of every block size
TOKENS = 40


def make_layer(**kwargs: Any) -> nc.Linear:
    torch.manual_seed(1)
    return nc.Linear(K, N, device=DEVICE, params_dtype=torch.bfloat16, **kwargs)


def make_input(*shape: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, K, generator=generator).bfloat16().to(DEVICE).requires_grad_(True)


Step = Callable[..., torch.Tensor]


def in_autocast(layer: nc.Linear, name: str) -> Step:
    """The layer under the recipe, autocast outside of what is compiled."""
    recipe = RECIPES[name]

    def run(x: torch.Tensor, forward: Step, **kwargs: Any) -> torch.Tensor:
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            return forward(x, **kwargs)

    return run


def gradients(
    layer: nc.Linear, run: Callable[[], torch.Tensor], x: torch.Tensor, **kwargs: Any
) -> list[torch.Tensor]:
    """Output and gradients of one step; the seed makes stochastic rounding repeat."""
    torch.manual_seed(7)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    y = run()
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted, **kwargs)]


def compare(
    name: str, steps: int = 2, dynamic: bool | None = None, backend: Any = "aot_eager", **layer_args: Any
):
    """Several steps eager and compiled, on copies of one layer."""
    eager_layer = make_layer(**layer_args)
    compiled_layer = copy.deepcopy(eager_layer)
    forward = torch.compile(compiled_layer, fullgraph=True, dynamic=dynamic, backend=backend)
    enter = in_autocast(eager_layer, name)
    for step in range(steps):
        tokens = (TOKENS,) if not dynamic else (TOKENS + 8 * step,)
        x = make_input(*tokens, seed=step)
        ours = gradients(compiled_layer, lambda: enter(x, forward), x)
        theirs = gradients(eager_layer, lambda: enter(x, eager_layer), x)
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["none", "current", "mxfp8", "delayed"])
def test_compiled_autograd(name: str) -> None:
    layer, x = make_layer(), make_input(TOKENS)
    enter = in_autocast(layer, name)
    theirs = gradients(layer, lambda: enter(x, layer), x)

    def step(x: torch.Tensor) -> None:
        enter(x, layer).float().square().sum().backward()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    assert_same([t.grad for t in (x, *layer.parameters()) if t.grad is not None], theirs[1:])


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_inductor(name: str) -> None:
    compare(name, steps=2, backend="inductor")


@pytest.mark.parametrize("name", kinds(RECIPES))
def test_autocast_inside_the_compiled_function(name: str) -> None:
    layer, recipe = make_layer(), RECIPES[name]

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            return layer(x)

    forward = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = make_input(TOKENS)
    ours = gradients(layer, lambda: forward(x), x)
    layer.reset_delayed_scaling()
    assert_same(ours, gradients(layer, lambda: step(x), x))


def test_autocast_nested_and_reentered_inside() -> None:
    layer = make_layer()
    outer, inner = RECIPES["current"], RECIPES["mxfp8"]

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=outer):
            y = layer(x)
            with nc.autocast(recipe=inner):
                y = y + layer(x)
            with nc.autocast(enabled=False):
                y = y + layer(x)
            return y + layer(x)

    x = make_input(TOKENS)
    forward = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(gradients(layer, lambda: forward(x), x), gradients(layer, lambda: step(x), x))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.requested)])
def test_recipe_built_inside_the_compiled_function(dynamic: bool | None) -> None:
    layer = make_layer()

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=nc.recipe.Float8BlockScaling()):
            y = layer(x)
        with nc.autocast(
            recipe=nc.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, emulate=EMULATE)
        ):
            return y + layer(x)

    x = make_input(TOKENS)
    forward = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same(gradients(layer, lambda: forward(x), x), gradients(layer, lambda: step(x), x))


@pytest.mark.parametrize("name", kinds(QUANTIZED))
def test_microbatches_forward_first_then_backward(name: str) -> None:
    eager = make_layer()
    compiled = copy.deepcopy(eager)
    forward = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    enter = in_autocast(eager, name)
    results = []
    for layer, run in ((compiled, forward), (eager, eager)):
        xs = [make_input(TOKENS, seed=seed) for seed in (0, 1)]
        outs = [enter(x, run, is_first_microbatch=i == 0) for i, x in enumerate(xs)]
        torch.manual_seed(7)
        for out in reversed(outs):
            out.float().square().sum().backward()
        results.append([*outs, *(x.grad for x in xs), layer.weight.grad])
    assert_same(*results)


def test_equal_recipe_does_not_recompile_another_does() -> None:
    layer = make_layer()
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(layer, fullgraph=True, backend=counter)
    x = make_input(TOKENS)
    for recipe in (
        nc.recipe.Float8CurrentScaling(),
        nc.recipe.Float8CurrentScaling(),
        nc.recipe.Float8CurrentScaling(use_power_2_scales=True),
        nc.recipe.Float8CurrentScaling(),
    ):
        with nc.autocast(recipe=recipe):
            forward(x)
    assert counter.frame_count == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_cache_of_another_recipe_is_not_used(compiled: bool) -> None:
    layer = make_layer()
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = make_input(TOKENS)
    pow2 = nc.recipe.Float8CurrentScaling(use_power_2_scales=True)
    for first, other in ((RECIPES["mxfp8"], RECIPES["current"]), (RECIPES["current"], pow2)):
        with nc.autocast(recipe=first):
            forward(x, is_first_microbatch=True)
        with nc.autocast(recipe=other):
            assert torch.equal(forward(x, is_first_microbatch=False), layer(x))


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_graph_saves_no_transpose_of_a_stored_weight(name: str, backend: str) -> None:
    """Under FSDP2, whose weights are no constants of a graph, they would stay between forward and backward."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(K, N, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    model = nc.convert(torch.nn.Sequential(layer), QUANTIZED[name], small=True, weights="stored")
    x, saved, (layer,) = make_input(TOKENS), [], model
    expected = gradients(model, lambda: model(x), x)
    weight = layer.weight.detach().clone()  # no parameter: those never count as saved
    call = functools.partial(torch.func.functional_call, layer)
    run = torch.compile(lambda x, weight: call({"weight": weight}, (x,)), fullgraph=True, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = gradients(model, lambda: run(x, weight), x)
    codes = [tuple(t.shape) for t in saved if t.dtype == torch.uint8]
    assert codes and (K, N) not in codes
    if name != "delayed":  # scales of the gradient are those of a later step
        assert_same(ours, expected)


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")),
    reason="PyTorch 2.11 traces no autograd.Function in a region",
)
@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8"])
def test_equal_blocks_as_regions_are_one_subgraph(name: str) -> None:
    """``nested_compile_region`` gives the compiler one of them; PyTorch refuses weights that share memory."""
    from torch._dynamo.backends.common import aot_autograd

    class Region(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        @torch.compiler.nested_compile_region
        def forward(self, x: torch.Tensor) -> Any:
            return self.block(x)

    subgraphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        subgraphs.append([name for name, _ in graph.named_children() if name.startswith("subgraph")])
        return aot_autograd(fw_compiler=lambda graph, inputs: graph)(graph, inputs)

    def step(region: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = [
            nc.TransformerLayer(
                32, 64, 2, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
            )
            for _ in range(3)
        ]
        model = torch.nn.Sequential(*(Region(block) if region else block for block in blocks))
        nc.set_recipe(model, name)
        run = torch.compile(model, fullgraph=True, backend=backend if region else "aot_eager")
        out = run(torch.randn(8, 2, 32, requires_grad=True))  # as every block after the first has it
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for found, wanted in zip(step(True), step(False), strict=True):
        assert torch.equal(found, wanted)
    assert subgraphs == [["subgraph_0"]]
