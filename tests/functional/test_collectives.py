"""What collectives refuse to send."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast.functional.collectives import sendable


class OnGpu(Tensor):
    """Memory that counts as a GPU's."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A tensor in the second of two segments, the one that is expandable, during a capture."""
    x = torch.zeros(3, 5).as_subclass(OnGpu)
    segments = [
        {"address": x.data_ptr() - 64, "total_size": 64, "is_expandable": False},
        {"address": x.data_ptr(), "total_size": 60, "is_expandable": True},
    ]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    return x


def test_captured_memory_of_expandable_segments(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"expandable segments.*NCCL_GRAPH_REGISTER=0"):
        sendable(x)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert sendable(x) is x


def test_other_memory_may_be_captured(x: Tensor) -> None:
    torch.cuda.memory_snapshot()[1]["is_expandable"] = False
    assert sendable(x) is x


def test_outside_of_a_capture(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert sendable(x) is x
    assert sendable(x.t()).is_contiguous()
