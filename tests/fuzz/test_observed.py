"""The oracles of ``observed`` see what an observer does wrong, and what an option gets wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import narrowcast as nc

from . import observed
from .programs import Difference, Program

PROGRAM: Program = {
    **dict.fromkeys(observed.draw(random.Random(0))),
    "layers": [{"kind": "linear", "bias": True}, {"kind": "again", "bias": False}],
    "recipe": {"family": "current", "options": {}},
    "how": "own",
    "history": [
        {"do": "step", "batches": [1, 2], "observers": [{"name": "repr", "place": "after forward"}]},
        {"do": "step", "batches": [3], "observers": []},
    ],
}


def test_an_innocent_observer_passes() -> None:
    assert observed.run({**PROGRAM, "fuse": True, "flags": True}) == []


@pytest.mark.parametrize("what", ["a parameter", "main_grad", "random numbers", "a mode"])
def test_an_observer_that_writes_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def see(world: Any, x: Any) -> None:
        layer = world.model.layers[0]
        if what == "a parameter":
            layer.bias.data.view(-1)[0] += 1e-6
        elif what == "main_grad":
            layer.weight.main_grad += 1e-3
        elif what == "random numbers":
            torch.rand(1)
        else:
            world.model.eval()
            layer.recipe = None

    monkeypatch.setattr(observed.World, "_see_repr", see)
    # an observer in the first batch's forward: what it adds to main_grad comes before the second batch
    with pytest.raises(Difference, match="an observer changes"):
        observed.run({**PROGRAM, "fuse": True})


def test_an_option_that_loses_a_contribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.autograd import linear

    def overwrite(wgrad: Any) -> None:
        for weight in wgrad.begins:
            weight.main_grad.zero_()

    observed.run({**PROGRAM, "fuse": True, "flags": True})
    monkeypatch.setattr(linear, "begin_main_grads_", overwrite)
    with pytest.raises(Difference, match="options move gradient weight"):
        observed.run({**PROGRAM, "fuse": True, "flags": True})


def test_a_mask_that_is_kept_as_codes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.attention import saved_codes

    mask = {"kind": "attention", "bias": False, "mask": "arbitrary", "groups": False, "rope": False}
    sizes = {"heads": 1, "head": 16, "tokens": 16, "sequences": 2, "saved": True}
    program = {**PROGRAM, **sizes, "layers": [mask]}
    assert observed.run(program) == []
    monkeypatch.setattr(saved_codes, "storage_key", lambda x: x.shape[-1])
    with pytest.raises(Difference, match="options move"):
        observed.run(program)


def test_sizes_coincide_as_often_as_not() -> None:
    drawn = [observed.draw(random.Random(seed)) for seed in range(200)]
    same = [one for one in drawn if one["head"] == one["tokens"]]
    assert 50 < len(same) < 150
    assert nc.get_deterministic() is None
