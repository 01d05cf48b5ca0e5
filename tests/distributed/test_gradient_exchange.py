"""``GradientExchange``: which gradients travel alone, and which together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def test_what_is_smaller_than_a_quarter_of_a_mebibyte_travels_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To each rank; so does what does not divide into equal parts."""
    from narrowcast.distributed import gradient_exchange

    sent: list[Tensor] = []

    def send(rows: Tensor, group: Any) -> tuple[Any, Tensor, Tensor]:
        sent.append(rows)
        return [], rows[0], rows[1:]

    monkeypatch.setattr(gradient_exchange, "_send", send)
    bf16 = torch.bfloat16
    gradients = [torch.ones(4, size, dtype=bf16) for size in (65535, 65536)]
    gradients.append(torch.ones(3, 70000, dtype=bf16))
    parts = [2 * 65535, 2 * 65536, 2 * 70000]
    output = torch.empty(sum(parts))
    for own, others, part in gradient_exchange._exchanged(gradients, output, SimpleNamespace(size=lambda: 2)):
        part.copy_(own.float() + others.float().sum(0))
    assert [tuple(rows.shape) for rows in sent] == [(2, parts[1]), (2, parts[0] + parts[2])]
    whole, alone, padded = output.split(parts)
    assert (whole == 2).all() and (alone == 2).all()
    assert (padded[:70000] == 2).all() and (padded[70000:] == 1).all()  # one rank has two rows, the other one
