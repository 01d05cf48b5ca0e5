"""Activation recomputation from outside: whoever calls it knows nothing of recipes, and every bit is right."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

RECIPES = {
    "current": nc.recipe.Float8CurrentScaling(),
    "delayed": nc.recipe.DelayedScaling(amax_history_len=3),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
}
Wrap = Callable[[nn.Module], Callable[..., Tensor]]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nc.GroupedLinear(2, 32, 32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, [4, x.shape[0] - 4])


def make_layers() -> list[nn.Module]:
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
    """``wrap``: what runs each layer in place of a call."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.layers, self.wrap = nn.ModuleList(make_layers()), wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.wrap(layer)(x)
        return x


def plainly(layer: nn.Module) -> Callable[..., Tensor]:
    return layer


def recomputed(layer: nn.Module, use_reentrant: bool) -> Callable[..., Tensor]:
    return lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)


def wrapped_by_fsdp(model: Any) -> nn.Module:
    """The layers in the wrappers that FSDP users, and torchtitan, put around blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model


def give(model: nn.Module, how: str, recipe: Any) -> Callable[[], Any]:
    """Tell a model its recipe; what to enter around the forward alone, its backward runs outside."""
    if how == "set_recipe":
        nc.set_recipe(model, recipe)
    elif how == "own":
        for module in model.modules():
            if hasattr(type(module), "recipe"):
                module.recipe = recipe
    return functools.partial(nc.autocast, recipe=recipe) if how == "autocast" else contextlib.nullcontext


def train(
    model: nn.Module, enter: Callable[[], Any], run: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Three steps: outputs, gradients, and the state of delayed scaling after each."""
    results = []
    for step in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + 2 * step)
        x.requires_grad_()
        with enter():
            y = model(x) if run is None else run(x)
        y.square().mean().backward()
        results += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]
        nc.renew_delayed_scaling(model).zero_grad()
        results += [buffer.clone() for buffer in model.buffers()]
    return results


def built(wrap: Wrap = plainly) -> Model:
    torch.manual_seed(0)
    return Model(wrap)


@functools.cache
def expected(how: str, kind: str) -> list[Tensor]:
    model = built()
    return train(model, give(model, how, RECIPES[kind]))


def assert_expected(results: list[Tensor], how: str, kind: str) -> None:
    wanted = expected(how, kind)
    assert len(results) == len(wanted)
    for index, (a, b) in enumerate(zip(results, wanted)):
        assert torch.equal(a, b), index


ways = pytest.mark.parametrize("how", ["autocast", "own", "set_recipe"])
kinds = pytest.mark.parametrize("kind", RECIPES)
reentrance = pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_hooks", "reentrant"])


@reentrance
@ways
@kinds
def test_around_single_layers(kind: str, how: str, use_reentrant: bool) -> None:
    model = built(functools.partial(recomputed, use_reentrant=use_reentrant))
    assert_expected(train(model, give(model, how, RECIPES[kind])), how, kind)


@reentrance
@ways
@kinds
def test_around_the_whole_model(kind: str, how: str, use_reentrant: bool) -> None:
    model = built()
    enter = give(model, how, RECIPES[kind])
    assert_expected(train(model, enter, recomputed(model, use_reentrant)), how, kind)


@ways
@kinds
def test_in_the_wrapper_of_fsdp(kind: str, how: str) -> None:
    model = wrapped_by_fsdp(built())
    assert_expected(train(model, give(model, how, RECIPES[kind])), how, kind)


@pytest.mark.parametrize(
    "kind, how",
    [
        ("delayed", "autocast"),
        ("delayed", "set_recipe"),
        pytest.param("mxfp8", "own", marks=pytest.mark.requested),  # of one layer: nn/test_compile_matrix.py
    ],
)
def test_compiled(kind: str, how: str) -> None:
    model = built(functools.partial(recomputed, use_reentrant=False))
    enter = give(model, how, RECIPES[kind])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_expected(train(model, enter, compiled), how, kind)


@pytest.mark.parametrize("kind", ["delayed"])
def test_a_compiled_layer_recomputed_by_eager_code(kind: str) -> None:
    model = built()
    enter = give(model, "set_recipe", RECIPES[kind])
    compiled = {layer: torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in model.layers}
    model.wrap = lambda layer: lambda x: checkpoint(compiled[layer], x, use_reentrant=False)
    assert_expected(train(model, enter), "set_recipe", kind)


@reentrance
def test_a_compiled_layer_that_cannot_know_its_recipe_says_so(use_reentrant: bool) -> None:
    """Compiled alone, it is traced again in the backward: never silently in high precision."""
    layer, x = nc.Linear(32, 32, device="cpu"), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with nc.autocast(recipe=RECIPES["current"]):
        y = checkpoint(compiled, x, use_reentrant=use_reentrant)
    with pytest.raises(Exception, match="give the layer its own recipe"):
        y.sum().backward()


@reentrance
def test_a_compiled_layer_under_an_autocast_and_its_own_recipe_says_so(use_reentrant: bool) -> None:
    layer, x = (
        nc.Linear(32, 32, device="cpu", recipe=RECIPES["mxfp8"]),
        torch.randn(16, 32, requires_grad=True),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with nc.autocast(recipe=RECIPES["current"]):
        y = checkpoint(compiled, x, use_reentrant=use_reentrant)
    with pytest.raises(Exception, match="ran under an autocast and is recomputed outside of it"):
        y.sum().backward()


@reentrance
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("second", ["delayed", None])
def test_two_forwards_under_two_recipes_before_their_backwards_say_so(
    second: str | None, training: bool, use_reentrant: bool
) -> None:
    """Neither recomputation could tell its own recipe; a step later each can."""
    layer, x = nc.Linear(32, 32, device="cpu").train(training), torch.randn(16, 32, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    other = RECIPES[second] if second else None
    for recipes in ((RECIPES["current"], other), (RECIPES["current"],), (other,)):
        losses = []
        for recipe in recipes:
            with nc.autocast(recipe is not None, recipe=recipe):
                losses.append(checkpoint(layer, x, use_reentrant=use_reentrant).sum())
        if len(recipes) > 1:
            with pytest.raises(RuntimeError, match="use narrowcast.checkpoint"):
                losses[0].backward()
        else:
            losses[0].backward()
        optimizer.step()


@pytest.mark.parametrize("by", ["optimizer", "call"])
def test_a_compiled_layer_forgets_the_autocasts_of_the_step_before(by: str) -> None:
    layer, x = nc.Linear(32, 32, device="cpu"), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with nc.autocast(recipe=RECIPES["mxfp8"]):
        compiled(x).sum().backward()
    if by == "optimizer":
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    else:
        nc.renew_delayed_scaling(layer)
    layer.recipe = RECIPES["current"]
    checkpoint(compiled, x, use_reentrant=False).sum().backward()


@reentrance
def test_a_compiled_function_that_enters_autocast_itself(use_reentrant: bool) -> None:
    grads = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        layer, x = nc.Linear(32, 32, device="cpu"), torch.randn(16, 32, requires_grad=True)

        def block(x: Tensor, layer: nc.Linear = layer) -> Tensor:
            with nc.autocast(recipe=RECIPES["current"]):
                return layer(x)

        run = torch.compile(block, fullgraph=True, backend="aot_eager") if compile_it else block
        with nc.autocast(recipe=RECIPES["mxfp8"]):
            layer(x)  # its last recipe in eager code is another
        checkpoint(run, x, use_reentrant=use_reentrant).square().sum().backward()
        grads += [x.grad, layer.weight.grad]
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])


@reentrance
def test_layers_under_several_recipes(use_reentrant: bool) -> None:
    """Each layer recomputes under its own last recipe, whatever the others have."""
    results = []
    for wrap in (plainly, functools.partial(recomputed, use_reentrant=use_reentrant)):
        model = built(wrap)
        table = {"layers.0": RECIPES["current"], "layers.1": RECIPES["mxfp8"], "layers.3": RECIPES["delayed"]}
        nc.set_recipe(model, table)
        results.append(train(model, contextlib.nullcontext))
    assert all(map(torch.equal, *results))


@reentrance
def test_recomputation_does_not_go_by_what_was_entered_since(use_reentrant: bool) -> None:
    """The last forward was in high precision; that of another layer since then was not."""
    first, other = built(functools.partial(recomputed, use_reentrant=use_reentrant)), built()
    x = torch.randn(16, 32, requires_grad=True)
    with nc.autocast(enabled=False):
        y = first(x)
    with nc.autocast(recipe=RECIPES["current"]):
        other(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x) if not use_reentrant else _reentrant_grad(y, x)
    (wanted,) = torch.autograd.grad(built()(x).square().sum(), x)
    assert torch.equal(grad, wanted)


def _reentrant_grad(y: Tensor, x: Tensor) -> tuple[Tensor]:
    y.square().sum().backward()  # the reentrant form knows no autograd.grad
    assert x.grad is not None
    return (x.grad,)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("index", range(4))
def test_recomputation_does_not_go_by_an_evaluation_since(index: int, kind: str, use_reentrant: bool) -> None:
    """In high precision, between the forward and its backward."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        layer = make_layers()[index]
        x = torch.randn(16, 32, requires_grad=True)
        with nc.autocast(recipe=RECIPES[kind]):
            y = checkpoint(layer, x, use_reentrant=use_reentrant)
        if evaluates:
            layer.eval()
            with torch.no_grad():
                layer(x)
            layer.train()
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *found))
