"""Recipes are in force per thread, whatever the others do, and in whatever order contexts are left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from delayed_simulation import clean_autocast
from torch import Tensor

import narrowcast as nc
from narrowcast.state import THREAD, AutocastState

__all__ = ["clean_autocast"]
CURRENT, MXFP8 = nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling()
DELAYED = nc.recipe.DelayedScaling(amax_history_len=3)
STEPS = 4


def built(seed: int) -> nc.LayerNormMLP:
    torch.manual_seed(seed)
    return nc.LayerNormMLP(32, 48, device="cpu")


def train(
    model: nc.LayerNormMLP, recipe: Any, run: Callable[..., Any], meet: Callable[[], Any] | None = None
) -> list[Tensor]:
    """Gradients and state of each step; ``meet`` is called inside the context, so that threads overlap there."""
    results = []
    for step in range(STEPS):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step)
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            if meet is not None:
                meet()
            y = run(x)
            if meet is not None:
                meet()
        y.square().mean().backward()
        results += [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]
        results += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    return results


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returned; the test fails with the error of one that raised."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return results


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "pair",
    [(CURRENT, MXFP8), (DELAYED, None), (DELAYED, DELAYED)],
    ids=["current_mxfp8", "delayed_none", "delayed_delayed"],
)
def test_two_models_in_two_threads(pair: tuple[Any, Any], compiled: bool) -> None:
    expected = [train(model, recipe, model) for recipe, model in zip(pair, (built(0), built(1)))]
    models = [built(0), built(1)]
    runs: list[Any] = models
    if compiled:  # before the threads start: the compiler itself is one at a time
        runs = [torch.compile(model, fullgraph=True, backend="aot_eager") for model in models]
        for model, recipe, run in zip(models, pair, runs):
            train(model, recipe, run)
        for model, seed in zip(models, (0, 1)):
            model.load_state_dict({**model.state_dict(), **dict(built(seed).named_parameters())})
            model.reset_delayed_scaling()
    barrier = threading.Barrier(2, timeout=60)
    works = [
        lambda model=model, recipe=recipe, run=run: train(model, recipe, run, barrier.wait)
        for model, recipe, run in zip(models, pair, runs)
    ]
    for ours, theirs in zip(in_threads(*works), expected):
        assert len(ours) == len(theirs)
        for index, (a, b) in enumerate(zip(ours, theirs)):
            assert torch.equal(a, b), index
    assert nothing_in_force()


def test_one_model_called_by_two_threads() -> None:
    """One set of weights that serves two recipes, without gradients."""
    model, x = built(0), torch.randn(16, 32)
    expected = []
    for recipe in (CURRENT, MXFP8):
        with nc.autocast(recipe=recipe):
            expected.append(model(x))
    barrier = threading.Barrier(2, timeout=60)

    def call(recipe: Any) -> list[Tensor]:
        outs = []
        for _ in range(20):
            with torch.no_grad(), nc.autocast(recipe=recipe):
                barrier.wait()
                outs.append(model(x))
        return outs

    for outs, wanted in zip(in_threads(lambda: call(CURRENT), lambda: call(MXFP8)), expected):
        assert all(torch.equal(out, wanted) for out in outs)


def test_a_new_thread_begins_without_a_recipe() -> None:
    with nc.autocast(recipe=CURRENT):
        assert in_threads(nothing_in_force) == [True]
        assert THREAD.state.recipe is CURRENT


def nothing_in_force() -> bool:
    state = THREAD.state
    return state.get() == AutocastState().get() and not state.entered


def leave(contexts: list[Any], values: list[Any], order: tuple[int, ...], in_force: Any) -> None:
    """Enter contexts and leave them in an order: the value of the innermost that is left over is in force."""
    for context in contexts:
        context.__enter__()
    remaining = list(range(len(contexts)))
    for index in order:
        contexts[index].__exit__(None, None, None)
        remaining.remove(index)
        assert in_force() is (values[remaining[-1]] if remaining else None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_contexts_left_in_any_order(order: tuple[int, ...]) -> None:
    recipes = [CURRENT, MXFP8, DELAYED]
    contexts = [nc.autocast(recipe=recipe) for recipe in recipes]
    for context in contexts:
        context.__enter__()
    entered = list(recipes)
    for index in order:
        contexts[index].__exit__(None, None, None)
        entered.remove(recipes[index])
        assert THREAD.state.recipe is (entered[-1] if entered else None)
        assert THREAD.state.depth == len(entered)
    assert nothing_in_force()
    with contexts[0]:  # each may be entered again
        assert THREAD.state.recipe is CURRENT
    assert nothing_in_force()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_contexts_left_in_any_order_with_one_that_disables(order: tuple[int, ...]) -> None:
    contexts = [nc.autocast(recipe=CURRENT), nc.autocast(enabled=False), nc.autocast(recipe=MXFP8)]
    leave(contexts, [CURRENT, None, MXFP8], order, lambda: THREAD.state.recipe)
    assert nothing_in_force()


def batches(recipe: Any) -> Generator[Any, None, None]:
    with nc.autocast(recipe=recipe):
        for _ in range(3):
            yield THREAD.state.recipe


def test_a_generator_that_is_used_up_leaves_nothing() -> None:
    assert list(batches(CURRENT)) == [CURRENT] * 3
    assert nothing_in_force()


def test_a_generator_that_is_dropped_leaves_nothing() -> None:
    first, second = batches(CURRENT), batches(MXFP8)
    next(first)
    next(second)
    first.close()
    assert THREAD.state.recipe is MXFP8
    del second
    assert nothing_in_force()


def test_generators_that_take_turns_leave_nothing() -> None:
    for _ in zip(batches(CURRENT), batches(MXFP8)):
        pass
    assert nothing_in_force()


def test_a_generator_that_another_thread_closes_leaves_nothing_in_either() -> None:
    with nc.autocast(recipe=MXFP8):
        batch = batches(CURRENT)
        next(batch)

        def close() -> bool:
            batch.close()
            return nothing_in_force()

        assert in_threads(close) == [True]
        assert THREAD.state.recipe is MXFP8
    assert nothing_in_force()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_initialisations_left_in_any_order(order: tuple[int, ...]) -> None:
    recipes = [CURRENT, None, MXFP8]
    contexts = [nc.quantized_model_init(recipe is not None, recipe) for recipe in recipes]
    leave(contexts, recipes, order, lambda: THREAD.state.init_recipe)
    with contexts[2]:
        assert THREAD.state.init_recipe is MXFP8
    assert THREAD.state.init_recipe is None and not THREAD.state.init_entered


def test_an_error_inside_leaves_nothing() -> None:
    with pytest.raises(KeyError), nc.autocast(recipe=CURRENT), nc.autocast(enabled=False):
        raise KeyError
    assert nothing_in_force()


@pytest.mark.parametrize(
    "positional", [(CURRENT,), (True, MXFP8), (False, CURRENT)], ids=["alone", "enabled", "disabled"]
)
def test_a_recipe_by_position(positional: tuple[Any, ...]) -> None:
    name = next(type(value).__name__ for value in positional if not isinstance(value, bool))
    with pytest.raises(TypeError, match=rf"autocast\(recipe={name}\(\.\.\.\)\)"):
        nc.autocast(*positional)
    assert nothing_in_force()
