"""Heads, thin outputs and adapters stay in high precision unless they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import narrowcast as nc

from .models import Conv1D, Model

CURRENT = nc.recipe.Float8CurrentScaling()
HEAD = "a head, whose rounding affects the loss directly; heads=True converts it"
THIN = "thin, so quantizing costs more than it gains; small=True converts it"


class Published(nn.Module):
    """Says of itself which module makes its outputs, as models of Transformers do."""

    def __init__(self, said: bool = True) -> None:
        super().__init__()
        self.inner, self.head, self.unembed = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 96)
        self.said = said

    def get_output_embeddings(self) -> nn.Module | None:
        return self.unembed if self.said else None


def kept(model: nn.Module, recipe: Any = CURRENT, **options: Any) -> dict[str, str]:
    receipt = nc.convert(model, recipe, dry_run=True, **options)
    return {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}


def named(*names: str) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(64, 64), **{name: nn.Linear(64, 96) for name in names}})


def test_a_head_is_what_the_model_says_or_what_is_tied_or_called_so() -> None:
    untied = Model()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    for model in (Model(), untied, nn.Sequential(Model())):
        assert kept(model) == {("0.head" if isinstance(model, nn.Sequential) else "head"): HEAD}
    assert kept(Published()) == {"unembed": HEAD}  # and not what is called head
    assert kept(Published(said=False)) == {"head": HEAD}
    wrapped = Published()
    wrapped.unembed = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 96))  # type: ignore[assignment]
    assert kept(wrapped) == {"unembed.0": HEAD, "unembed.1": HEAD}
    assert kept(named("head", "output", "lm_head")) == {"lm_head": HEAD}
    assert kept(named("head", "output")) == {"output": HEAD}
    assert kept(nn.ModuleDict({"a": named("output"), "b": named("output", "head")})) == {}  # no one output


def test_a_side_below_32_beside_four_times_as_many_is_thin() -> None:
    sizes = [(64, 2), (4, 64), (512, 31), (64, 17), (512, 32), (8, 8), (31, 123), (31, 124)]
    model = nn.Sequential(*(nn.Linear(*one) for one in sizes), Conv1D(3, 64))
    assert kept(model) == {name: THIN for name in "01278"} | {}


def test_one_is_converted_by_its_option_or_by_its_whole_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(64, 96), "classes": nn.Linear(64, 2), "body": nn.Linear(64, 64)})
    assert kept(model) == {"head": HEAD, "classes": THIN}
    assert kept(model, heads=True) == {"classes": THIN}
    assert kept(model, small=True) == {"head": HEAD}
    assert set(kept(model, only="head")) == {"classes", "body"}
    assert set(kept(model, only=["head", "classes"])) == {"body"}
    assert set(kept(model, only=("**.head", "body"))) == {"head", "classes"}
    assert kept(model, {"": CURRENT, "classes": CURRENT}) == {"head": HEAD}
    assert kept(nn.Linear(64, 2)) == {}  # there is nothing else that could be meant
    with pytest.raises(ValueError, match=rf"'head': {HEAD}"):
        nc.convert(model, CURRENT, only="**.head")
    nc.convert(model, CURRENT, heads=True)
    assert isinstance(model["head"], nc.Linear) and type(model["classes"]) is nn.Linear
    assert set(nc.get_recipes(nc.convert(model, "block"))) == {"head", "body"}  # what is converted stays so
    assert "small=True converts it" in str(nc.receipt(model))
