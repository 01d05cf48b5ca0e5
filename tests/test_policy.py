"""``policy="auto"``: the faster of high precision and the recipe per size, measured once per GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc

RECIPE = nc.recipe.Float8CurrentScaling()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """A GPU on which layers of 64 or more input features are faster under a recipe; what was measured on it."""
    calls: list[tuple[Any, ...]] = []

    def measure(rows: int, n: int, k: int, *options: Any) -> tuple[float, float]:
        calls.append((rows, n, k, options[-1]))
        return (2.0, 1.0) if k >= 64 else (1.0, 2.0)

    monkeypatch.setattr(nc.policy, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU/80 GB")
    monkeypatch.setenv("NARROWCAST_CACHE", str(tmp_path))
    return calls


def model() -> nn.Sequential:
    place: dict[str, Any] = {"device": "cpu"}
    return nn.Sequential(
        nc.Linear(32, 64, **place), nc.Linear(64, 64, **place), nc.LayerNormMLP(64, 32, **place)
    )


def test_the_faster_one_is_chosen_and_measured_once(measured: list[Any], tmp_path: Path) -> None:
    first = nc.set_recipe(model(), RECIPE, policy="auto", rows=128)
    # fc1 of the block is 64 -> 32, fc2 32 -> 64: together they are even, and no recipe loses
    assert nc.get_recipes(first) == {"0": None, "1": RECIPE, "2": None}
    assert measured == [(128, 64, 32, False), (128, 64, 64, False), (128, 32, 64, False)]
    nc.set_recipe(model(), RECIPE, policy="auto", rows=128)
    assert len(measured) == 3
    nc.set_recipe(model(), {"0": RECIPE}, policy="auto-graphs", rows=128)
    nc.set_recipe(model(), {"0": nc.recipe.MXFP8BlockScaling()}, policy="auto", rows=128)
    assert len(measured) == 5
    (file,) = (tmp_path / "policy").iterdir()
    assert file.name == f"A-GPU-80-GB-torch-{torch.__version__}.json"
    assert [one.recipe_ms for one in nc.policy.timings()] == [2.0, 1.0, 1.0, 2.0, 2.0]
    file.write_text(file.read_text()[:-40])  # cut off: measured anew
    nc.set_recipe(model(), {"1": RECIPE}, policy="auto", rows=128)
    assert len(measured) == 6
    nc.policy.forget()
    assert nc.policy.timings() == []


def test_the_receipt_tells_the_choice(measured: list[Any]) -> None:
    plain = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))
    receipt = nc.receipt(nc.convert(plain, RECIPE, policy="auto", rows=128))
    assert [one.decision for one in receipt.gemms] == ["kept", "converted"]
    assert (
        "high precision is faster: 128x32->64 takes 2.000 ms, in high precision 1.000"
        in receipt.gemms[0].reason
    )
    assert "auto: 128x64->64 takes 1.000 ms" in receipt.gemms[1].reason
    assert type(plain[0]) is nn.Linear


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_measured(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NARROWCAST_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="cannot be kept in .*file/policy'.*; set NARROWCAST_CACHE to a folder"):
        nc.convert(nn.Sequential(nn.Linear(64, 64)), "current", policy="auto", rows=8)
    assert not measured


def test_without_a_policy_nothing_is_measured(measured: list[Any]) -> None:
    nc.set_recipe(model(), RECIPE)
    assert not measured


def test_errors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layers = model()
    for error, message, options in (
        (ValueError, "policy is 'fastest'; use one of None, 'auto'", {"policy": "fastest", "rows": 8}),
        (ValueError, "rows=None; give the rows", {"policy": "auto"}),
        (RuntimeError, "torch sees none", {"policy": "auto", "rows": 8}),
    ):
        with pytest.raises(error, match=message):
            nc.set_recipe(layers, RECIPE, **options)
        with pytest.raises(error, match=message):
            nc.convert(nn.Sequential(nn.Linear(32, 32)), RECIPE, **options)
    for call in (nc.policy.timings, nc.policy.forget):
        with pytest.raises(RuntimeError, match=r"torch sees none; run this on a machine with a CUDA GPU"):
            call()
    assert nc.get_recipes(layers) == {"0": None, "1": None, "2": None}


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["auto", "auto-graphs"])
def test_on_a_gpu(policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smallest layer is faster in bf16; what is faster at the largest is the recipe."""
    monkeypatch.setenv("NARROWCAST_CACHE", str(tmp_path))
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    layers = nn.Sequential(nc.Linear(64, 64, **place), nc.Linear(8192, 8192, **place))
    nc.set_recipe(layers[0], RECIPE, policy=policy, rows=64)
    nc.set_recipe(layers[1], RECIPE, policy=policy, rows=8192)
    assert nc.get_recipes(layers) == {"0": None, "1": RECIPE}
    assert len(nc.policy.timings()) == 2
