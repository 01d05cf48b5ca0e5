"""Training steps of several layers on a GPU: compiled and captured ones equal eager ones, state included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.functional import replay

pytestmark = pytest.mark.gpu

RECIPES: dict[str, nc.recipe.Recipe] = {
    "delayed": nc.recipe.DelayedScaling(amax_history_len=4),
    "current": nc.recipe.Float8CurrentScaling(),
    "block": nc.recipe.Float8BlockScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(emulate=True),
    "mxfp6": nc.recipe.MXFP6BlockScaling(emulate=True),
    "mxfp4": nc.recipe.MXFP4BlockScaling(emulate=True),
    "nvfp4": nc.recipe.NVFP4BlockScaling(emulate=True, disable_stochastic_rounding=True),
}
NATIVE = ("delayed", "current", "block")


class Model(nn.Module):
    """A linear layer, a feed-forward block, a norm with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.first = nc.Linear(256, 384, **place)
        self.block = nc.LayerNormMLP(384, 512, activation="swiglu", normalization="RMSNorm", **place)
        self.last = nc.LayerNormLinear(384, 256, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Grouped(nn.Module):
    """A linear layer and two grouped ones, whose splits are on the host or on the device."""

    def __init__(self, on_host: bool) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.first = nc.Linear(256, 256, **place)
        self.up = nc.GroupedLinear(4, 256, 384, **place)
        self.down = nc.GroupedLinear(4, 384, 256, single_grouped_parameter=True, **place)
        self.on_host = on_host
        self.register_buffer("splits", torch.tensor([64, 0, 50, 16], device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        splits: Any = [64, 0, 50, 16] if self.on_host else self.splits
        return self.down(self.up(self.first(x), splits).relu(), splits)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": Model,
    "grouped, host splits": lambda: Grouped(True),
    "grouped, device splits": lambda: Grouped(False),
}


def given(model: Any, recipe: nc.recipe.Recipe, renewed_by: str) -> Any:
    """The model with a recipe: the root's, each layer's own, or that of the autocast it will run under."""
    if renewed_by == "root":
        nc.set_recipe(model, recipe)
    elif renewed_by == "own":
        for layer in model.children():
            layer.recipe = recipe  # type: ignore[assignment]
    return model


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Gradients, and state after them."""
    for parameter in model.parameters():
        parameter.grad = None
    run(x).float().square().mean().backward()
    tensors = [*(parameter.grad for parameter in model.parameters()), *model.buffers()]
    return [tensor.clone() for tensor in tensors if tensor is not None]


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    scales = [1 + 3 * i for i in range(count)]
    return [torch.randn(130, 256, device="cuda", generator=generator).mul_(s).bfloat16() for s in scales]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("name", "renewed_by"),
    [*((name, "root") for name in RECIPES), ("delayed", "own"), ("delayed", "autocast")],
)
def test_compiled_steps_equal_eager_ones(name: str, renewed_by: str, backend: str) -> None:
    torch.manual_seed(0)
    recipe, model = RECIPES[name], Model()
    results: list[list[list[Tensor]]] = []
    for compiled in (False, True):
        own = given(copy.deepcopy(model), recipe, renewed_by)
        run: Any = torch.compile(own, fullgraph=True, backend=backend) if compiled else own
        results.append([])
        for x in inputs(4):
            with nc.autocast(recipe=recipe) if renewed_by == "autocast" else torch.enable_grad():
                y = run(x)
            results[-1].append(step(own, lambda _, y=y: y, x))
    for eager, traced in zip(*results, strict=True):
        assert len(eager) == len(traced)
        assert all(torch.equal(a, b) for a, b in zip(eager, traced))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("renewed_by", ["root", "own", "autocast"])
def test_compiled_batches_without_rows_collect_what_eager_ones_do(renewed_by: str, backend: str) -> None:
    """The amax of the weights: of a graph without rows, whose products read nothing."""
    torch.manual_seed(0)
    recipe, model = RECIPES["delayed"], Model()
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        own = given(copy.deepcopy(model), recipe, renewed_by)

        def behind(x: Tensor, own: nn.Module = own) -> Tensor:
            return own(x).relu()  # whose empty result Inductor makes itself, without reading the model's

        run: Any = (
            torch.compile(behind, fullgraph=True, dynamic=False, backend=backend) if compiled else behind
        )
        results.append([])
        for x in (inputs(1)[0], inputs(1)[0][:0], inputs(1)[0][:0], inputs(1)[0]):
            with nc.autocast(recipe=recipe) if renewed_by == "autocast" else torch.enable_grad():
                y = run(x)
            y.float().sum().backward()
            results[-1] += [y.detach(), *(p.grad.clone() for p in own.parameters() if p.grad is not None)]
            results[-1] += [buffer.clone() for buffer in own.buffers()]
            own.zero_grad()
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.mul_(1.5)
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


@pytest.mark.parametrize("tokens", [(128,), (3, 37), (4096,)])
@pytest.mark.parametrize("name", RECIPES)
def test_replayed_steps_equal_others(
    name: str, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that are replayed do what they did, on a stream of the caller's, too; all of them could be recorded."""
    torch.manual_seed(0)
    model, results = Model(), []
    replay._known.clear()
    for enabled in (False, True):
        monkeypatch.setattr(replay, "ENABLED", enabled)
        own = nc.set_recipe(copy.deepcopy(model), RECIPES[name])
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for seed in range(5):
                x = torch.randn(
                    *tokens, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
                )
                results.append(step(own, own, x.bfloat16()))
            torch.cuda.synchronize()
    for plain, replayed in zip(results[:5], results[5:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    kept = [key[0].__name__ for key, value in replay._known.items() if value is key[0]]
    assert len(replay._known) >= 6 and not kept


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", NATIVE)
def test_reduce_overhead(name: str, kind: str) -> None:
    """Weights that change between replays are read; so do optimizers change them."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    eager, graphed = (nc.set_recipe(copy.deepcopy(model), RECIPES[name]) for _ in range(2))
    run = torch.compile(graphed, fullgraph=True, mode="reduce-overhead")
    for x in inputs(6):
        torch.compiler.cudagraph_mark_step_begin()
        wanted, found = step(eager, eager, x), step(graphed, run, x)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        change_weights(eager)
        change_weights(graphed)


@pytest.mark.parametrize(
    "how",
    [
        {"backend": "aot_eager"},
        {"backend": "inductor"},
        {"mode": "reduce-overhead"},
    ],
    ids=["aot_eager", "inductor", "reduce-overhead"],
)
@pytest.mark.parametrize("renewed_by", ["root", "own"])
def test_evaluations_between_compiled_steps(renewed_by: str, how: dict[str, str]) -> None:
    """In training mode, without gradients: what they collect is taken back before a step renews."""
    torch.manual_seed(0)
    models = [given(copy.deepcopy(model), RECIPES["delayed"], renewed_by) for model in [Model()] * 2]
    runs = [models[0], torch.compile(models[1], fullgraph=True, **how)]  # type: ignore[call-overload]
    given_x = inputs(6)
    for x, larger in zip(given_x[:-1], given_x[1:]):
        results = []
        for model, run in zip(models, runs):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                evaluated = run(larger).clone()
            torch.compiler.cudagraph_mark_step_begin()
            results.append([evaluated, *step(model, run, x)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def change_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", NATIVE)
def test_captured_step(name: str, kind: str) -> None:
    """Forward and backward in one graph; replays go on from the state that eager steps would go on from."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    eager, captured = (nc.set_recipe(copy.deepcopy(model), RECIPES[name]) for _ in range(2))
    start = [buffer.clone() for buffer in captured.buffers()]
    x = inputs(1)[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            captured.zero_grad(set_to_none=False)
            captured(x).float().square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.zero_grad(set_to_none=False)
        captured(x).float().square().mean().backward()
    for buffer, value in zip(captured.buffers(), start, strict=True):
        buffer.copy_(value)
    for given_x in inputs(5):
        x.copy_(given_x)
        graph.replay()
        found = [tensor.clone() for tensor in (*(p.grad for p in captured.parameters()), *captured.buffers())]  # type: ignore[union-attr]
        wanted = step(eager, eager, given_x)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        change_weights(eager)
        change_weights(captured)
