"""What is said of the machine that trains."""

from __future__ import annotations

import pytest
import torch

from narrowcast_tools.train import machine


@pytest.mark.parametrize(
    ("device", "capability", "told"),
    [("cpu", "AVX2", True), ("cpu", "AVX512", False), ("cuda", "AVX2", False)],
)
def test_a_processor_that_multiplies_bf16_slowly_is_told(
    device: str, capability: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert ("no AVX-512" in machine.remark(device)) == told
