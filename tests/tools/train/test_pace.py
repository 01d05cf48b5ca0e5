"""MFU and memory."""

from __future__ import annotations

import pytest
import torch

from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.flops import flops_per_token
from narrowcast_tools.train.pace import Pace, format_pace, measure


def test_the_share_of_a_known_peak(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowcast_tools.train.pace.peak_flops", lambda device: 1e9)
    speed = 0.25e9 / flops_per_token(config.model, config.seq_len)
    pace = measure(config, speed)
    assert pace.mfu == pytest.approx(0.25)
    assert "MFU 25.0%" in format_pace(pace)
    assert measure(config, 0.0).mfu is None


def test_an_unknown_share_is_left_out(config: TrainConfig) -> None:
    pace = measure(config, 100.0)
    assert pace.mfu is None
    assert "MFU" not in format_pace(pace)
    assert pace.memory > 2**27, "this process with torch has more than that"


@pytest.mark.gpu
def test_memory_of_a_gpu_is_what_torch_allocated(config: TrainConfig) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.empty(2**24, device="cuda", dtype=torch.uint8)
    config = type(config)(**{**vars(config), "device": "cuda"})
    assert measure(config, 1.0).memory >= before + held.numel()


def test_nothing_was_timed() -> None:
    assert format_pace(Pace(0.0, None, 5)) == ""
