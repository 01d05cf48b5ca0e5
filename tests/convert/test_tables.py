"""Tables of recipes that say nothing, and arguments that nothing would read, are refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc

DELAYED = nc.recipe.DelayedScaling()


def give(call: Any, recipe: Any, **options: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 32) if call is nc.convert else nc.Linear(32, 32))
    before = repr(model)
    try:
        call(model, recipe, **options)
    finally:
        assert repr(model) == before


@pytest.mark.parametrize("call", [nc.convert, nc.set_recipe])
def test_what_says_nothing(call: Any) -> None:
    with pytest.raises(ValueError, match="got an empty table of recipes; name a pattern"):
        give(call, {})
    with pytest.raises(TypeError, match="3, of type int, is no pattern; name modules by text"):
        give(call, {3: DELAYED})
    with pytest.raises(ValueError, match="rows=64 without a policy"):
        give(call, DELAYED, rows=64)


@pytest.mark.parametrize(
    "name, nearest", [("MXFP8", "'mxfp8'"), ("fp8", "'current'"), ("float8", "'current'")]
)
def test_the_nearest_recipe(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no recipe is named '{name}'; the nearest: {nearest}; use one of"):
        nc.recipe.recipe_from_name(name)


def test_no_table_has_no_json() -> None:
    with pytest.raises(TypeError, match="^recipes is 'x', of type str; pass a table"):
        nc.recipe.recipes_to_json("x")  # type: ignore[arg-type]


def test_a_size_that_is_true_and_a_dtype_of_eight_bits() -> None:
    with pytest.raises(ValueError, match="^in_features is True; use a positive whole number"):
        nc.Linear(True, 32)
    with pytest.raises(TypeError, match="^params_dtype is torch.float8_e4m3fn; use torch.bfloat16"):
        nc.Linear(32, 32, params_dtype=torch.float8_e4m3fn)
