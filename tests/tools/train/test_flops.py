"""Operations of a step, against torch's counter; peaks of GPUs, none of which is guessed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from narrowcast_tools.train.config import ModelConfig
from narrowcast_tools.train.flops import flops_per_token, peak_flops
from narrowcast_tools.train.model import Decoder, next_token_loss


def test_the_formula_is_what_runs() -> None:
    """Torch counts the whole square of the attention's scores, of which a causal model needs half."""
    shape, seq_len = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=96, vocabulary=128), 32
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    model = Decoder(shape, seq_len)
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model, tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in counted.items() if "attention" in str(op))
    gemms = sum(counted.values()) - attention
    causal = 6 * shape.layers * shape.dim * seq_len * tokens.numel()
    assert gemms + causal == flops_per_token(shape, seq_len) * tokens.numel()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA H2000", None),
        ("Another accelerator", None),
    ],
)
def test_peaks(name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops("cuda") == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops("cpu") is None
