"""How far it is from a module's call to its first kernel, and how many Python calls of ours one step takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from recipes import DEVICE

import narrowcast as nc

ROOT = str(Path(nc.__file__).parent)
# what computes: here the reference, on a GPU the kernels; what they call on the way is theirs
NUMERICS = ("/reference/", "/kernels/")

# Before Python 3.12 each is a frame of its own.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


class Calls(NamedTuple):
    """``count``: calls of functions of this package. ``hops``: how many stood between the user and the numerics."""

    count: int
    hops: int


def calls_of(run: Callable[[], Any]) -> Calls:
    stack: list[bool] = []  # of our frames: whether each belongs to the numerics
    count, hops = 0, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, hops
        file = frame.f_code.co_filename
        if not file.startswith(ROOT) or frame.f_code.co_name in COMPREHENSIONS:
            return
        if event == "return":
            stack.pop()
        elif event == "call":
            inside = bool(stack) and stack[-1]
            numerics = inside or any(room in file for room in NUMERICS)
            if not numerics:
                count += 1
            elif not inside and not hops:
                hops = len(stack)
            stack.append(numerics)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Calls(count, hops)


def step(module: Any) -> tuple[Calls, Calls]:
    """Of the second forward and its backward: the first one resolves the plan."""
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    outs: list[Any] = []
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
        first = module(x)
        first.backward(torch.ones_like(first))  # PyTorch imports what it needs for a given gradient
        forward = calls_of(lambda: outs.append(module(x)))
    grad = torch.ones_like(outs[0])
    return forward, calls_of(lambda: outs[0].backward(grad))


PLACE: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "make, hops, count",
    [
        (lambda: nc.Linear(64, 64, **PLACE), 7, 45),
        (lambda: nc.LayerNormMLP(64, 64, **PLACE), 8, 95),
        # a list that is not replayed, as on a CPU, and in the first two steps on a GPU
        (lambda: nc.ops.Sequential(nc.ops.Linear(64, 64, **PLACE)), 11, 85),
    ],
    ids=["linear", "layernorm_mlp", "sequential"],
)
def test_short_ways(make: Any, hops: int, count: int) -> None:
    """The last hop, the kernel's launch, is not seen here: with it they are 8, 9 and 12."""
    forward, backward = step(make())
    assert 1 <= forward.hops <= hops and forward.count <= count
    assert 1 <= backward.hops <= hops and backward.count <= count


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the reference's calls, too")
@pytest.mark.parametrize("way", ["own", "set_recipe", "autocast"])
def test_calls_of_a_forward_under_delayed_scaling(way: str) -> None:
    """All Python frames of the package in a warm forward, those of the numerics too; an autocast is entered before."""
    recipe, counts = nc.recipe.DelayedScaling(), []
    layer = nc.Linear(64, 64, recipe=recipe if way == "own" else None, **PLACE)
    if way == "set_recipe":
        nc.set_recipe(layer, recipe)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        counts[-1] += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    x = torch.randn(32, 64, **PLACE, requires_grad=True)
    with nc.autocast(recipe=recipe) if way == "autocast" else contextlib.nullcontext():
        for _ in range(4):
            counts.append(0)
            sys.setprofile(profile)
            try:
                y = layer(x)
            finally:
                sys.setprofile(None)
            y.sum().backward()
    assert 0 < counts[-1] <= 85


def test_without_a_recipe_a_linear_layer_is_that_of_torch() -> None:
    """So that layers which a policy leaves in high precision cost no more than before."""
    layer, x = nc.Linear(64, 64, **PLACE), torch.randn(32, 64, **PLACE)
    assert calls_of(lambda: layer(x)).count <= 2


@pytest.mark.parametrize(
    "recipe, most", [(nc.recipe.Float8CurrentScaling(), 2_100), (nc.recipe.DelayedScaling(), 2_800)]
)
def test_the_compiler_traces_few_instructions(recipe: Any, most: int, monkeypatch: Any) -> None:
    """Of a layer's first forward and backward: most of the time to compile a layer goes there."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    count, step_of = 0, Translator.step

    def counted(translator: Any) -> Any:
        nonlocal count
        count += 1
        return step_of(translator)

    monkeypatch.setattr(Translator, "step", counted)
    layer = nc.set_recipe(nc.LayerNormMLP(64, 64, **PLACE), recipe)
    torch.compile(layer, fullgraph=True, backend="eager")(torch.randn(32, 64, **PLACE, requires_grad=True))
    assert 0 < count <= most
