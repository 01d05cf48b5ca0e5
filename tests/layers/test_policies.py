"""Which policy a name means, and what a policy is asked about a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.layers import policies

RECIPE = nc.recipe.Float8CurrentScaling()
OTHER = nc.recipe.MXFP8BlockScaling()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A policy named "mine" that answers with another recipe, and what it was asked."""
    calls: list[Any] = []

    def mine(*arguments: Any) -> tuple[Any, str]:
        calls.append(arguments)
        return OTHER, "because"

    monkeypatch.setitem(policies.POLICIES, "mine", mine)
    return calls


def test_a_policy_by_its_name(asked):
    assert policies.policy_named("mine", 1) is policies.POLICIES["mine"]
    with pytest.raises(ValueError, match="policy is 'yours'; use one of None, .*mine"):
        policies.policy_named("yours", 1)


@pytest.mark.parametrize("rows", [None, 0, -1])
def test_a_policy_needs_rows(asked, rows):
    with pytest.raises(ValueError, match=f"policy='mine' with rows={rows}; give the rows"):
        policies.policy_named("mine", rows)


def test_a_layer_is_asked_about_by_the_sizes_of_each_of_its_gemms(asked):
    linear = nc.Linear(32, 48, params_dtype=torch.bfloat16)
    assert policies.choose(linear, RECIPE, "mine", 7) is OTHER
    assert asked.pop() == (RECIPE, [(7, 48, 32)], torch.bfloat16)
    mlp = nc.LayerNormMLP(32, 64, params_dtype=torch.float32)
    assert policies.choose(mlp, RECIPE, "mine", 5) is OTHER
    fc1, fc2 = mlp.fc1_weight.shape, mlp.fc2_weight.shape
    recipe, shapes, dtype = asked.pop()
    assert (recipe, dtype) == (RECIPE, torch.float32) and set(shapes) == {(5, *fc1), (5, *fc2)}


def test_layers_that_were_not_measured_keep_their_recipe(asked):
    grouped = nc.GroupedLinear(2, 32, 32, single_grouped_weight=True)
    in_parts = nc.GroupedLinear(2, 32, 32)
    for layer in (grouped, in_parts, torch.nn.Linear(32, 32)):
        assert policies.choose(layer, RECIPE, "mine", 7) is RECIPE
    assert policies.choose(nc.Linear(32, 32), None, "mine", 7) is None
    assert not asked
