"""What cannot fit is refused before it is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowcast_tools.train import memory
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.errors import SettingsError, TrainingError
from narrowcast_tools.train.memory import memory_told, parameters_of, require_memory
from narrowcast_tools.train.model import Decoder
from narrowcast_tools.train.presets import PRESETS


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(dim=48, layers=3, heads=6, kv_heads=3, hidden=20, tie_embeddings=True),
        ModelConfig(dim=32, layers=1, heads=2, kv_heads=2, hidden=48),
    ],
)
def test_parameters_are_counted(config: ModelConfig) -> None:
    model = Decoder(config, seq_len=8)
    assert parameters_of(config) == sum(p.numel() for p in model.parameters())


def test_what_fits_is_let_through(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    require_memory(TrainConfig())
    scores = 4 * 256 * config.batch_size * config.seq_len
    monkeypatch.setattr(memory, "_memory_of", lambda device: 16 * parameters_of(config.model) + scores)
    require_memory(config)
    with pytest.raises(SettingsError, match=r"the scores of a batch would take .* cpu has .*--batch-size"):
        require_memory(replace(config, batch_size=1000))


def test_a_model_that_is_too_large_names_the_largest_preset_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for room, told in (
        (16, "; lower --dim, --hidden or --layers, or use --preset 1b$"),
        (0.01, " or --layers$"),
    ):
        monkeypatch.setattr(memory, "_memory_of", lambda device, room=room: int(room * 2**30))
        with pytest.raises(SettingsError, match=told):
            require_memory(PRESETS["8b"])
    with pytest.raises(SettingsError, match=" or --layers$"):
        require_memory(replace(PRESETS["8b"], init="folder"))


def test_failed_allocations_are_told(config: TrainConfig) -> None:
    with (
        pytest.raises(TrainingError, match=r"cpu ran out of memory; lower --batch-size \(2\)"),
        memory_told(config),
    ):
        torch.empty(2**62, dtype=torch.uint8)
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError()):
        with pytest.raises(TrainingError, match="ran out of memory"), memory_told(config):
            raise error
    with pytest.raises(RuntimeError, match="another"), memory_told(config):
        raise RuntimeError("another")
