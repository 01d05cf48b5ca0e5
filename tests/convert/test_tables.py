"""Tables of recipes that say nothing, and arguments that nothing would read, are refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
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
