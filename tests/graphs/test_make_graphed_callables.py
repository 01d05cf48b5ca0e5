"""Graphed modules train as eager ones do.

On a GPU they are CUDA graphs. On a CPU a stand-in runs again what was captured and writes to the tensors of the
capture: so everything but the capture itself is tested.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import narrowcast as nc
from narrowcast.graphs import make_graphed_callables as room
from narrowcast.testing import assert_close

WIDTH, ROWS = 64, 96


class StandIn:
    """Runs again what was recorded, and writes what comes out over the first results."""

    replays = 0

    def beside(self) -> Any:
        return contextlib.nullcontext()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result = run()

        def replay() -> None:
            StandIn.replays += 1
            with torch.enable_grad():
                made = run()
            for kept, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(made)):
                if isinstance(kept, Tensor) and kept is not new:
                    kept.data.copy_(new.data)

        return result, replay


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setitem(room.__globals__, "_graphs", lambda pool: StandIn())


def assert_same(ours: list[Any], theirs: list[Any], entry: str = "fp8_flips") -> None:
    for a, b in zip(ours, theirs, strict=True):
        if DEVICE == "cpu":
            assert (a is None and b is None) or torch.equal(a, b)
        elif a is not None:
            assert_close(a, b, entry)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nc.LayerNormLinear(WIDTH, WIDTH, device=DEVICE), nn.GELU(), nc.Linear(WIDTH, WIDTH, device=DEVICE)
    )


def sample(requires_grad: bool = True) -> Tensor:
    return torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=requires_grad)


def train(
    module: Any, parts: list[Any], call: Callable[[Any, Tensor, int], Tensor], steps: int = 4
) -> list[Tensor]:
    """Outputs, input gradients and at last weights of some steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)  # of stochastic rounding, too
        x = torch.randn(ROWS, WIDTH).to(DEVICE).requires_grad_()
        y = x
        for part in parts:
            y = call(part, y, step)
        y.square().mean().backward()
        seen += [y.detach().clone(), x.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in module.parameters())]


def plain(part: Any, x: Tensor, step: int) -> Tensor:
    return part(x)


@pytest.mark.parametrize("name", RECIPES)
def test_layers_with_recipes_of_their_own(name: str) -> None:
    ours, theirs = model(), model()
    nc.set_recipe(ours, RECIPES[name])
    nc.set_recipe(theirs, RECIPES[name])
    assert nc.make_graphed_callables(ours, (sample(),)) is ours
    entry = "fp4_layer" if name == "nvfp4" else "fp8_flips"
    assert_same(train(ours, [ours], plain), train(theirs, [theirs], plain), entry)


@pytest.mark.parametrize("around", [True, False], ids=["autocast around", "autocast of the call"])
@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_under_an_autocast(name: str, around: bool) -> None:
    recipe = RECIPES[name]

    def call(part: Any, x: Tensor, step: int) -> Tensor:
        with nc.autocast(recipe=recipe):
            return part(x)

    ours, theirs = nn.ModuleList([model(), model()]), nn.ModuleList([model(), model()])
    parts = nc.make_graphed_callables(tuple(ours), ((sample(),), (sample(),)), enabled=True, recipe=recipe)
    assert parts == tuple(ours)
    assert_same(train(ours, list(parts), call if around else plain), train(theirs, list(theirs), call))


def test_state_is_what_it_was_before_the_capture() -> None:
    module = nn.Sequential(*model(), nn.BatchNorm1d(WIDTH, device=DEVICE))
    nc.set_recipe(module, RECIPES["delayed"])
    before = copy.deepcopy(module.state_dict())
    nc.make_graphed_callables(module, (sample(),))
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    late = model()  # which learns of delayed scaling in the warm-up
    nc.make_graphed_callables(late, (sample(),), enabled=True, recipe=RECIPES["delayed"])
    assert late[2].amax is not None and not late[2].amax.any() and not late[2].amax_history.any()


def test_one_recipe_per_callable() -> None:
    ours, theirs = (nn.ModuleList([model(), model()]) for _ in range(2))
    nc.make_graphed_callables(
        tuple(ours), ((sample(),),) * 2, enabled=(True, False), recipe=RECIPES["current"]
    )
    enabled = iter([True, False] * 9)

    def call(part: Any, x: Tensor, step: int) -> Tensor:
        with nc.autocast(next(enabled), recipe=RECIPES["current"]):
            return part(x)

    assert_same(train(ours, list(ours), plain), train(theirs, list(theirs), call))


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_weights_quantized_in_the_first_microbatch(name: str, fused: bool) -> None:
    def make() -> Any:
        torch.manual_seed(2)
        module: Any = nc.Linear(WIDTH, WIDTH, device=DEVICE, fuse_wgrad_accumulation=fused)
        nc.set_recipe(module, RECIPES[name])
        if fused:
            module.weight.main_grad = torch.full((WIDTH, WIDTH), 7.0, device=DEVICE)
        return module

    def steps(module: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            for microbatch in range(2):
                torch.manual_seed(step)
                x = torch.randn(ROWS, WIDTH).to(DEVICE).requires_grad_()
                y = module(x, is_first_microbatch=microbatch == 0)
                y.square().sum().backward()
                seen += [y.detach().clone(), x.grad.clone()]
            grad = module.weight.main_grad if fused else module.weight.grad
            seen.append(grad.clone())
            with torch.no_grad():
                module.weight.add_(grad, alpha=-1e-3)
            module.weight.grad = None
        return seen

    ours = make()
    nc.make_graphed_callables(ours, (sample(),), cache_quantized_params=True)
    if fused:
        assert (ours.weight.main_grad == 7).all(), "the warm-up left nothing"
    assert_same(steps(ours), steps(make()), "fp4_layer" if name == "nvfp4" else "fp8_flips")


@pytest.mark.parametrize("way", ["fused", "transposed", "edited"])
def test_kept_weights_that_changed_between_microbatches_are_quantized_again(way: str) -> None:
    layer: Any = nc.Linear(WIDTH, WIDTH, device=DEVICE, recipe=RECIPES["current"])
    twin = copy.deepcopy(layer)
    nc.make_graphed_callables(layer, (sample(),), cache_quantized_params=True)
    x, seen = torch.randn(ROWS, WIDTH).to(DEVICE), []
    for module in (layer, twin):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        module(x, is_first_microbatch=True).sum().backward()
        if way == "fused":
            optimizer.step()
        elif way == "transposed":  # a graph reads the memory, so it is written where it is
            module.weight.data.copy_(module.weight.data.t().clone())
            torch.autograd.graph.increment_version(module.weight)
        else:
            with torch.no_grad():
                module.weight.mul_(2)
        seen.append(module(x, is_first_microbatch=False if module is layer else None).detach().clone())
    assert_same(seen[:1], seen[1:])
    layer(x, is_first_microbatch=False)
    replays = StandIn.replays
    layer(x, is_first_microbatch=False)
    assert StandIn.replays <= replays + 1  # the forward alone: the weight is the same


class Many(nn.Module):
    """Keywords, None, several outputs, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nc.Linear(WIDTH, WIDTH, device=DEVICE)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"y": y if mask is None else y * mask, "argmax": y.argmax(-1), "none": None}


def test_keywords_none_and_structured_outputs() -> None:
    torch.manual_seed(3)
    ours = Many()
    theirs = copy.deepcopy(ours)
    scale = torch.ones(WIDTH, device=DEVICE)
    nc.make_graphed_callables(ours, (sample(), None), sample_kwargs={"scale": scale})
    x = [sample() for _ in range(2)]
    x[1].data.copy_(x[0].data)
    given = torch.full((WIDTH,), 2.0, device=DEVICE)
    results = [module(data, None, scale=given) for module, data in zip((ours, theirs), x)]
    for result in results:
        result["y"].sum().backward()
    assert results[0]["none"] is None and not results[0]["argmax"].requires_grad
    assert_same([results[0]["y"].detach(), x[0].grad], [results[1]["y"].detach(), x[1].grad])
    for arguments, message in (
        (((x[0],), {"scale": given}), "other arguments"),
        (((x[0], x[0]), {"scale": given}), "got None for a tensor"),
        (((x[0][:5], None), {"scale": given}), r"called with \(5, 64\)"),
        (((x[0], None), {"scale": given.requires_grad_()}), "needs a gradient and its sample did not"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(*arguments[0], **arguments[1])


def test_functions_evaluation_and_hooks() -> None:
    graphed = nc.make_graphed_callables(lambda x: (x * x).sin(), (sample(),))
    x = sample()
    graphed(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * (x.detach() ** 2).cos())
    module = nn.Sequential(nn.Dropout(0.5), *model())
    ran: list[int] = []
    module.register_forward_pre_hook(lambda *_: ran.append(1))
    nc.make_graphed_callables(module, (sample(),), pre_warmup_hook=lambda: ran.append(5), num_warmup_iters=1)
    assert ran == [5], "a module's own hooks run around the replay"
    module(x)
    assert ran == [5, 1]
    module.eval()  # captured in training: runs eagerly
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("clone", [True, False])
def test_gradients_of_parameters_are_copies(clone: bool) -> None:
    module = model()
    nc.make_graphed_callables(module, (sample(),), clone_param_grads_on_return=clone)
    module(sample()).sum().backward()
    weight = module[2].weight
    kept, value = weight.grad, weight.grad.clone()
    weight.grad = None
    (2 * module(sample())).square().sum().backward()
    assert torch.equal(kept, value) == clone


ONE_BY_ONE = [1, 2, -2, -1, 1, 2, -2, -1]


@pytest.mark.parametrize(
    "order", [ONE_BY_ONE, [1, 2, 1, 2, -2, -1, -2, -1]], ids=["one by one", "two at once"]
)
@pytest.mark.parametrize("reuse", [False, True])
def test_an_order_of_chunks_and_microbatches(order: list[int], reuse: bool) -> None:
    """Two chunks, two microbatches; the permission to share buffers changes no value."""
    chunks = nn.ModuleList([model(), model()])
    twins = copy.deepcopy(chunks)
    nc.set_recipe(chunks, RECIPES["current"])
    nc.set_recipe(twins, RECIPES["current"])
    calls = nc.make_graphed_callables(
        tuple(chunks),
        tuple((sample(),) for _ in range(4)),
        _order=order,
        _reuse_graph_input_output_buffers=reuse,
    )
    assert len(calls) == 4  # chunk 1 of both microbatches, then chunk 2
    inputs, waiting = [sample() for _ in range(2)], []
    for group in [[0], [1]] if order == ONE_BY_ONE else [[0, 1]]:
        for microbatch in group:
            x = inputs[microbatch]
            twin = x.detach().clone().requires_grad_()
            waiting.append((calls[2 + microbatch](calls[microbatch](x)), x, twins[1](twins[0](twin)), twin))
        for y, x, expected, twin in waiting:
            y.sum().backward()
            expected.sum().backward()
            assert_same([y.detach(), x.grad], [expected.detach(), twin.grad])
        waiting.clear()
    assert_same([p.grad for p in chunks.parameters()], [p.grad for p in twins.parameters()])


def test_a_reset_frees_the_graphs_and_ends_the_calls() -> None:
    module, freed = model(), []
    forward, other = nc.make_graphed_callables((module, model()), ((sample(),),) * 2, _order=[1, 2, -2, -1])
    y = forward(sample())
    other(sample())
    weakref.finalize(forward.reset.__self__.leaves[0], freed.append, True)
    forward.reset()
    del y
    gc.collect()
    assert freed, "the graph's input is gone"
    with pytest.raises(RuntimeError, match=r"after its reset\(\); capture it again"):
        forward(sample())
    other(sample()).sum().backward()  # the others stay
    module(sample()).sum().backward()


@pytest.mark.gpu
def test_replays_draw_new_random_numbers() -> None:
    states = nc.CudaRNGStatesTracker("cuda", graph_safe=True)
    states.add("model-parallel-rng", 5)

    def drop(x: Tensor) -> Tensor:
        with states.fork():
            y = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(y, 0.5)

    graphed = nc.make_graphed_callables(drop, (sample(False),))
    x = torch.ones(ROWS, WIDTH, device="cuda")
    first = graphed(x).clone()
    assert not torch.equal(first, graphed(x))
