"""Presets: the shapes they promise."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from narrowcast_tools.cli.presets import RECIPES, TABLE, presets
from narrowcast_tools.hardware import find_optimizer
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.flops import flops_per_token
from narrowcast_tools.train.memory import bytes_of_weight, expected_peak, parameters_of
from narrowcast_tools.train.names import RECIPES as NAMES
from narrowcast_tools.train.presets import PRESETS, find_preset, fitting_evaluations, fitting_warmup

MILLIONS = {"tiny": 3.1, "125m": 85.3, "1b": 974.2, "8b-slice": 874.5, "8b": 8030.3}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes(name: str) -> None:
    assert parameters_of(find_preset(name).model) / 1e6 == pytest.approx(MILLIONS[name], abs=0.05)


def test_a_vocabulary_of_words_makes_it_125m() -> None:
    model = replace(PRESETS["125m"].model, vocabulary=50257, tie_embeddings=True)
    assert parameters_of(model) / 1e6 == pytest.approx(125, abs=2)


def test_the_slice_is_of_an_8b_llama() -> None:
    model = PRESETS["8b-slice"].model
    assert (model.dim, model.hidden, model.heads, model.kv_heads) == (4096, 14336, 32, 8)


def test_unknown() -> None:
    with pytest.raises(SettingsError, match=r"--preset is '7b'; .*use one of tiny, 125m, 1b, 8b-slice or 8b"):
        find_preset("7b")


def shown(config: TrainConfig) -> list[str]:
    """Return the column of a preset."""
    model, parameters = config.model, parameters_of(config.model)
    return [
        str(model.layers),
        str(model.dim),
        str(model.hidden),
        f"{model.heads}/{model.kv_heads}",
        f"{parameters / 1e6:,.1f}M",
        f"{bytes_of_weight(config) * parameters / 2**30:,.2f}",
        f"{expected_peak(config) / 2**30:,.1f}",
        f"{config.batch_size}x{config.seq_len}",
        f"{flops_per_token(model, config.seq_len) * config.tokens_per_step / 1e12:,.2f}",
        str(config.steps),
        f"{config.lr:g}",
        str(config.warmup),
        f"{config.weight_decay:g}",
        f"{config.clip:g}",
        str(config.eval_every),
        str(config.eval_batches),
        str(config.save_every),
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_shows_each(
    columns: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *presets_shown = zip(*TABLE)
    assert presets_shown == [(name, *shown(config)) for name, config in PRESETS.items()]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    presets()
    text = capsys.readouterr().out.replace(f"{sys.executable} -m", "python -m")
    lines = [line.split() for line in text.splitlines()]
    assert all(" ".join(row).split() in lines for row in TABLE), "no number is folded"
    full = sum(find_optimizer(PRESETS["8b"].optimizer)) * parameters_of(PRESETS["8b"].model) / 2**30
    assert float(TABLE[6][-1]) < 0.7 * full, "it counted 15 GiB of gradients that --step-in-backward frees"
    assert all(len(line) <= columns for line in text.splitlines() if not line.startswith("next:"))


def test_what_differs_besides_is_told(capsys: pytest.CaptureFixture) -> None:
    """No command said what `current` or `block` means, or which optimizer a preset sets."""
    presets()
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line for line in lines if line}
    assert tuple(RECIPES) == NAMES and all(RECIPES[name] in told[name] for name in NAMES)
    assert {config.optimizer for name, config in PRESETS.items() if name != "8b"} == {"adamw"}
    assert PRESETS["8b"].optimizer in told["optimizer"]
    for preset in PRESETS.values():
        options = (preset.chunked_loss, preset.saved_activations == "fp8", preset.step_in_backward)
        assert set(options) == {preset is PRESETS["8b"]}


@pytest.mark.parametrize(
    ("steps", "warmup"), [(None, 40), (900, 40), (300, 40), (240, 40), (200, 33), (20, 3), (4, 0)]
)
def test_the_warmup_of_fewer_steps(steps: int | None, warmup: int) -> None:
    """It stays the preset's while it is no more than a sixth of the steps."""
    assert fitting_warmup(PRESETS["tiny"], steps) == warmup
    assert all(fitting_warmup(preset, preset.steps - 1) == preset.warmup for preset in PRESETS.values())


@pytest.mark.parametrize(("steps", "every"), [(None, 25), (900, 25), (250, 25), (30, 3), (4, 1)])
def test_the_evaluations_of_fewer_steps(steps: int | None, every: int) -> None:
    """A run of 30 steps had two of them."""
    assert fitting_evaluations(PRESETS["tiny"], steps) == every
