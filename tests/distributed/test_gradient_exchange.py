"""``GradientExchange``: which gradients travel alone, and which together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_smaller_than_a_quarter_of_a_mebibyte_travels_together(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each rank; so does what does not divide into equal parts. Beside GEMMs all are one transfer, else in
    pieces.
    """
    from narrowcast.distributed import gradient_exchange

    monkeypatch.setattr(gradient_exchange, "_PIECE", 100_000)

    sent: list[Tensor] = []
    batches: list[Any] = []

    def transfers(rows: Tensor, group: Any) -> tuple[list[Any], Tensor, Tensor]:
        sent.append(rows)
        return [len(sent)], rows[0], rows[1:]

    def start(batch: list[Any]) -> list[Any]:
        batches.append(batch)
        return []

    monkeypatch.setattr(gradient_exchange, "_transfers", transfers)
    monkeypatch.setattr(gradient_exchange.dist, "batch_isend_irecv", start)
    bf16 = torch.bfloat16
    gradients = [torch.ones(4, size, dtype=bf16) for size in (65535, 65536)]
    gradients.append(torch.ones(3, 70000, dtype=bf16))
    parts = [2 * 65535, 2 * 65536, 2 * 70000]
    output = torch.empty(sum(parts))
    two: Any = SimpleNamespace(size=lambda: 2)
    for own, others, part in gradient_exchange._exchanged(gradients, output, two, one_by_one):
        part.copy_(own.float() + others.float().sum(0))
    pieces = [(2, 100_000), (2, parts[1] - 100_000)] if one_by_one else [(2, parts[1])]
    assert batches == ([[1], [2], [3]] if one_by_one else [[1, 2]])
    assert [tuple(rows.shape) for rows in sent] == [*pieces, (2, parts[0] + parts[2])]
    whole, alone, padded = output.split(parts)
    assert (whole == 2).all() and (alone == 2).all()
    assert (padded[:70000] == 2).all() and (padded[70000:] == 1).all()  # one rank has two rows, the other one


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, None])
def test_sums_take_what_the_stream_of_the_model_gave_back(kept: torch.dtype | None) -> None:
    """Where FSDP2 keeps them as gradients; else the memory of the stream that reduces."""
    from narrowcast.distributed.gradient_exchange import GradientExchange
    from narrowcast.distributed.stand_in import StandIn

    exchange, device = GradientExchange(), torch.device("cuda", torch.cuda.current_device())
    exchange.begin(True, kept)
    count, reduces = 3 << 20, torch.cuda.Stream()
    gradient = torch.ones(2 * count, dtype=torch.bfloat16, device=device)
    given = exchange.allocate((2 * count,), dtype=torch.float32, device=device)
    assert isinstance(given, StandIn)
    given.contents.tensors.append(gradient)
    activation = torch.empty(count, dtype=kept or torch.float32, device=device)
    address = activation.data_ptr()
    del activation
    reduces.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reduces):
        sums = exchange.allocate((count,), dtype=torch.float32, device=device)
    assert sums.dtype == (kept or torch.float32)
    assert (sums.data_ptr() == address) == (kept is not None)
