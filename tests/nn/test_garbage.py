"""Steps leave nothing to the garbage collector: a tensor in a cycle takes memory until that runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modules import LAYERS, run_layer
from recipes import DEVICE, RECIPES
from torch import nn

import narrowcast as nc

MODELS: dict[str, Callable[..., Any]] = {
    **{kind: LAYERS[kind] for kind in ("linear", "layernorm_mlp", "grouped")},
    "transformer": lambda **options: nc.TransformerLayer(
        32, 64, 4, layernorm_epsilon=1e-5, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **options
    ),
    "operations": lambda recipe: nc.set_recipe(
        nc.ops.Sequential(nc.ops.LayerNorm(32), nc.ops.Linear(32, 48), nc.ops.GELU()), recipe
    ),
}


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    """What the collector would free, from here on, of tensors that are not there yet."""
    gc.collect()
    # what other tests left: the compiler lets go of some of its graphs only in the next step
    others = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    others.clear()


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_leaves_no_tensor_in_a_cycle(kind: str, recipe: str, request: pytest.FixtureRequest) -> None:
    model: nn.Module = MODELS[kind](recipe=RECIPES[recipe]).to(DEVICE)
    optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.ones(8, 1, 32, device=DEVICE) if kind == "transformer" else torch.ones(8, 32, device=DEVICE)
        run_layer(model, x.requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # what is made once may be
    kept = request.getfixturevalue("kept")
    step()
    gc.collect()
    assert not [tuple(one.shape) for one in kept if isinstance(one, torch.Tensor)]
