"""Scales are constant within a step, so every order of forwards, recomputations and evaluations is the plain one."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

RECIPE = nc.recipe.DelayedScaling(amax_history_len=3)
GIVEN = ["set_recipe", "own", "autocast"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nc.GroupedLinear(2, 32, 32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, [5, x.shape[0] - 5])


def blocks() -> list[nn.Module]:
    return [
        nc.Linear(32, 32, device="cpu"),
        nc.LayerNormMLP(32, 48, activation="swiglu", device="cpu"),
        Experts(),
        nc.ops.Sequential(
            nc.ops.Linear(32, 48, device="cpu"), nc.ops.GELU(), nc.ops.Linear(48, 32, device="cpu")
        ),
        nc.LayerNormLinear(32, 32, device="cpu"),
    ]


class Model(nn.Module):
    """``wrap``: what runs each block in place of a call."""

    def __init__(self, wrap: Any = lambda block: block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())
        self.run = [wrap(block) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.run:
            x = x + block(x)
        return x


def made(wrap: Any = lambda block: block) -> Model:
    torch.manual_seed(0)
    return Model(wrap)


def give(model: nn.Module, given: str, recipe: Any = RECIPE) -> Callable[[], Any]:
    """Tell a model its recipe; what to enter around each forward."""
    if given == "set_recipe":
        nc.set_recipe(model, recipe)
    elif given == "own":
        for module in model.modules():
            if hasattr(type(module), "recipe"):
                module.recipe = recipe
    return functools.partial(nc.autocast, recipe=recipe) if given == "autocast" else contextlib.nullcontext


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.full((9, 32), 1000.0))
    model.train()


def train(
    model: nn.Module,
    enter: Callable[[], Any] = contextlib.nullcontext,
    call: Any = None,
    order: str = "fifo",
    between: Callable[[nn.Module], None] | None = None,
    steps: int = 3,
) -> list[Tensor]:
    """Steps of two microbatches; gradients, parameters and state after each."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    call = model if call is None else call
    for step in range(steps):
        pending, inputs = [], []
        for part in range(2):
            generator = torch.Generator().manual_seed(2 * step + part)
            x = torch.randn(9, 32, generator=generator) * (1 + 3 * step + 5 * part)
            inputs.append(x.requires_grad_())
            with enter():
                pending.append(call(x).square().mean())
                if between is not None:
                    between(model)
            if order == "fifo":
                pending.pop().backward()
        for loss in reversed(pending):
            loss.backward()
        found += [x.grad for x in inputs]
        found += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found += [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return found


@functools.cache
def plain(given: str, order: str) -> list[Tensor]:
    model = made()
    return train(model, give(model, given), order=order)


def assert_plain(found: list[Tensor], given: str, order: str) -> None:
    wanted = plain(given, order)
    assert len(found) == len(wanted)
    for index, (a, b) in enumerate(zip(found, wanted)):
        assert torch.equal(a, b), index


def recomputed(reentrant: bool, inner: Any = lambda block: block) -> Any:
    return lambda block: functools.partial(checkpoint, inner(block), use_reentrant=reentrant)


def twice(model: nn.Module) -> Any:
    """A forward whose graph runs backward before it does, with other gradients."""

    def call(x: Tensor) -> Tensor:
        y = model(x)
        torch.autograd.grad(y, [x], torch.zeros_like(y), retain_graph=True)
        return y

    return call


def compiled(backend: str) -> Any:
    return lambda block: torch.compile(block, backend=backend, fullgraph=True)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("order", ["fifo", "lifo"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_blocks(given: str, order: str, reentrant: bool) -> None:
    model = made(recomputed(reentrant))
    assert_plain(train(model, give(model, given), order=order), given, order)


@pytest.mark.parametrize("given", GIVEN)
def test_an_evaluation_in_between(given: str) -> None:
    model = made()
    assert_plain(train(model, give(model, given), order="lifo", between=evaluate), given, "lifo")
    model = made(recomputed(False))
    assert_plain(train(model, give(model, given), order="lifo", between=evaluate), given, "lifo")


@pytest.mark.parametrize("given", GIVEN)
def test_checkpoints_in_a_checkpoint(given: str) -> None:
    model = made(recomputed(False))
    outer = functools.partial(checkpoint, model, use_reentrant=False)
    assert_plain(train(model, give(model, given), outer, "lifo"), given, "lifo")


@pytest.mark.parametrize("given", GIVEN)
def test_a_graph_that_runs_backward_twice(given: str) -> None:
    model = made()
    assert_plain(train(model, give(model, given), twice(model), "lifo"), given, "lifo")


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_model(given: str, backend: str) -> None:
    model = made()
    call = compiled(backend)(model)
    assert_plain(train(model, give(model, given), call, "lifo", evaluate), given, "lifo")


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", ["set_recipe", "own"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_in_checkpoints(given: str, reentrant: bool) -> None:
    model = made(recomputed(reentrant, compiled("aot_eager_decomp_partition")))
    assert_plain(train(model, give(model, given), order="lifo"), given, "lifo")


@pytest.mark.parametrize("given", GIVEN)
def test_checkpoints_in_a_graph(given: str) -> None:
    model = made(recomputed(False))
    call = compiled("aot_eager_decomp_partition")(model)
    assert_plain(train(model, give(model, given), call, "lifo"), given, "lifo")


def test_a_copy_goes_on_as_the_original() -> None:
    model = made()
    nc.set_recipe(model, RECIPE)
    train(model, steps=1)
    other = copy.deepcopy(model)
    other.run = list(other.blocks)
    for a, b in zip(train(model), train(other)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("layer", range(5))
def test_a_step_between_a_forward_and_its_backward_raises(layer: int, compiles: bool) -> None:
    torch.manual_seed(0)
    block = blocks()[layer]
    nc.set_recipe(block, RECIPE)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    call = compiled("aot_eager")(block) if compiles else block
    x = torch.randn(9, 32, requires_grad=True)
    call(x).sum().backward()
    late = call(x).sum()
    optimizer.step()
    with pytest.raises(
        RuntimeError,
        match="modified by an inplace operation" + (".*" if compiles else ".*run the backward first"),
    ):
        late.backward()


def test_two_models_that_train_each_other() -> None:
    """Neither's step touches the other's scales, of which a backward is to come."""
    generator, critic = made(), made()
    for model in (generator, critic):
        nc.set_recipe(model, RECIPE)
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic))
    for seed in range(2):
        fake = generator(torch.randn(9, 32, generator=torch.Generator().manual_seed(seed)))
        critic(fake.detach()).mean().backward()
        of_critic.step()
        (-critic(fake).mean()).backward()
        of_generator.step()
    assert all(model.blocks[0].scale[0] > 0 for model in (generator, critic))
