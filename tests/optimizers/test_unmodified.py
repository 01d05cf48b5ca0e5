"""Other people's optimizers, unmodified, on layers with plain and with quantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import RECIPES
from torch import nn

import narrowcast as nc

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9),
    "fused_adam": lambda p: nc.optimizers.FusedAdam(p, lr=3e-3, master_weights=True),
}
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def trained(make: Any, quantized: bool, device: torch.device) -> tuple[float, float]:
    """First and last loss of some steps."""
    torch.manual_seed(0)
    recipe = RECIPES["current"]
    with nc.quantized_model_init(quantized, recipe=recipe, preserve_high_precision_init_val=True):
        model = nn.Sequential(
            nc.LayerNormLinear(64, 128, device=device, recipe=recipe),
            nn.GELU(),
            nc.Linear(128, 64, device=device, recipe=recipe),
        )
    optimizer = make(model.parameters())
    x, y = torch.randn(2, 96, 64, device=device)
    seen = []
    for _ in range(12):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen[0], seen[-1]


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains(name: str, quantized: bool, device: torch.device) -> None:
    first, last = trained(OPTIMIZERS[name], quantized, device)
    assert last < 0.95 * first


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", LOW_BIT)
def test_torchaos_low_bit_optimizers(name: str, device: torch.device) -> None:
    optimizers = pytest.importorskip("torchao.optim", reason="needs torchao: pip install torchao")
    if name == "AdamWFp8" and device.type == "cpu":
        pytest.skip("torchao's AdamWFp8 is for GPUs")
    first, last = trained(lambda p: getattr(optimizers, name)(p, lr=3e-3), False, device)
    assert last < 0.95 * first
