"""Settings are checked when they are made, and name the option and the value that is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowcast_tools.train.config import (
    ModelConfig,
    TrainConfig,
    compared_fields,
    setting_of,
)
from narrowcast_tools.train.device import require_compiler, resolve_device
from narrowcast_tools.train.errors import SettingsError

INSIDE: dict = {"step_in_backward": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"--steps is 0; .*at least 1"),
        ({"batch_size": -3}, r"--batch-size is -3"),
        ({"seq_len": 0}, r"--seq-len is 0"),
        ({"accumulate": 0}, r"--accumulate is 0"),
        ({"accumulate": 3}, r"--accumulate is 3; it must divide --batch-size 8"),
        ({"lr": 0.0}, r"--lr is 0; .*above 0"),
        ({"lr": float("nan")}, r"--lr is nan; it must be above 0 and finite"),
        ({"lr": float("inf")}, r"--lr is inf; it must be above 0 and finite"),
        ({"clip": float("nan")}, r"--clip is nan; it must be a number above 0"),
        ({"clip": -1.0}, r"--clip is -1;"),
        ({"warmup": -1}, r"--warmup is -1"),
        ({"seed": -1}, r"--seed is -1"),
        ({"save_every": -1}, r"--save-every is -1; .*0 or more"),
        ({"saved_activations": "fp4"}, r"--saved-activations is fp4; use fp8"),
        (INSIDE, r"--clip is 1; .*give --clip inf, or --no-step-in-backward"),
        ({**INSIDE, "accumulate": 2}, r"--accumulate is 2; .*give 1, or --no-step-in-backward"),
        ({**INSIDE, "clip": math.inf, "graphs": True}, r"--graphs is on; .*give --no-graphs"),
        ({**INSIDE, "clip": math.inf, "compile": True}, r"--compile is on; .*add --by-block"),
        ({"recipe": "fp7"}, r"--recipe is 'fp7'; use one of bf16, delayed"),
    ],
)
def test_bad_training_settings(changes: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, r"--dim is 0"),
        ({"layers": -1}, r"--layers is -1"),
        ({"heads": 0}, r"--heads is 0"),
        ({"dim": 36, "heads": 4}, r"--dim is 36; it must be a multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, r"--kv-heads is 3; it must divide --heads 4"),
    ],
)
def test_bad_shapes(changes: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ModelConfig(**changes)


def test_none_is_another_word_for_bf16() -> None:
    assert TrainConfig(recipe="none") == TrainConfig(recipe="bf16")


def test_only_the_saving_rhythm_may_differ_on_resume(config: TrainConfig) -> None:
    def compared(changed: TrainConfig) -> dict:
        return dict(compared_fields(changed))

    assert compared(config) == compared(replace(config, save_every=1))
    assert compared(config) != compared(replace(config, seed=1))
    assert compared(config) != compared(replace(config, model=replace(config.model, hidden=64)))


def test_settings_are_spelled_as_options() -> None:
    assert setting_of("batch_size", 4) == "--batch-size 4"
    assert setting_of("compile", True) == "--compile"
    assert setting_of("tie_embeddings", False) == "--no-tie-embeddings"


def test_device_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cpu") == "cpu"
    for built, remedy in (("13.0", "check the driver"), (None, "install a CUDA build of torch")):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(SettingsError, match=rf"--device is cuda, but .* use --device cpu, or {remedy}"):
            resolve_device("cuda")
    with pytest.raises(SettingsError, match=r"--device is 'tpu'; use one of auto, cpu or cuda"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda"


def test_compiling_for_the_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SettingsError, match=r"--compile needs a C\+\+ compiler .*install g\+\+ or leave"):
        require_compiler("cpu")
    require_compiler("cuda")
    compiler = tmp_path / "clang++"
    compiler.touch(mode=0o755)
    require_compiler("cpu")
