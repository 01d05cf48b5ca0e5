"""``--recipe auto``: which layers get FP8, and what the run's settings then say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast_tools.train import automatic
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.recipes import CHOICES, RecipeChoice

CONFIG = TrainConfig(
    device="cuda",
    batch_size=6,
    accumulate=2,
    seq_len=8,
    model=ModelConfig(64, 3, 2, 1, 96),
    keep_bf16="blocks.0",
)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, tuple[float, float]]:
    """A GPU with FP8, and its times of layers by their input features: in bf16 and under the recipe."""
    found: dict[int, tuple[float, float]] = {}

    def measure(rows: int, n: int, k: int, dtype: torch.dtype, *options: Any) -> tuple[float, float]:
        assert (rows, dtype, options[-1]) == (3 * 8, torch.bfloat16, False)
        return found[k]

    native = replace(CHOICES["current"], native=lambda return_reason: (True, ""))
    monkeypatch.setitem(CHOICES, "current", native)
    monkeypatch.setattr(nc.policy, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setenv("NARROWCAST_CACHE", str(tmp_path))
    return found


def test_layers_that_lose_stay_in_bf16(times: dict[int, tuple[float, float]]) -> None:
    times.update({64: (1.0, 1.2), 96: (2.0, 1.0)})
    config, told = automatic.choose(CONFIG, alone=True)
    kept = "blocks.*.attention.qkv,blocks.*.attention.proj,blocks.*.feed_forward.gate_up"
    assert (config.recipe, config.keep_bf16) == ("current", f"blocks.0,{kept}")
    assert "current, but bf16 for attention.qkv" in told and "feed_forward.down 0.50" in told


def test_all_of_them_or_none(times: dict[int, tuple[float, float]]) -> None:
    times.update({64: (1.0, 0.98), 96: (1.0, 3.0)})  # a gain of two percent varies between runs
    config, told = automatic.choose(CONFIG, alone=True)
    assert config == CONFIG and told.startswith("auto: bf16; time of a layer")
    nc.policy.forget()
    times.update({64: (1.0, 0.9), 96: (1.0, 0.8)})
    config, told = automatic.choose(CONFIG, alone=True)
    assert config == replace(CONFIG, recipe="current") and told.startswith("auto: current; ")


ON_A_CPU = (
    "auto: bf16; a CPU gains nothing from fewer bits, which it emulates; to compare: --recipe bf16,current"
)


def test_where_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, times: dict[int, tuple[float, float]]
) -> None:
    table = replace(CONFIG, recipe_table='{"head": null}')
    for config, alone, told in (
        (replace(CONFIG, device="cpu"), True, ON_A_CPU),
        (CONFIG, False, "auto: bf16, since no layers are timed with --parallel"),
        (table, True, "auto: bf16, since no layers are timed with --recipe-table"),
    ):
        assert automatic.choose(config, alone=alone) == (config, told)
    monkeypatch.setitem(
        CHOICES, "current", RecipeChoice("FP8", native=lambda return_reason: (False, "too old"))
    )
    assert automatic.choose(CONFIG, alone=True) == (CONFIG, "auto: bf16; too old")
