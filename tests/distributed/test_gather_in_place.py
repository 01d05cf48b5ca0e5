"""``GatherInPlace``: codes travel to where layers read them, whose memory is taken before they arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def codes_of(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.uint8)


def test_what_has_a_place_goes_there_and_all_else_together(group: Any) -> None:
    """On a CPU the caller does not wait, and the memory of a weight does not count as changed."""
    from narrowcast.distributed.gather_in_place import GatherInPlace
    from narrowcast.distributed.stand_in import StandIn

    gather, place = GatherInPlace(), torch.zeros(6, dtype=torch.uint8)
    codes, others = codes_of(6, 1), [codes_of(4, 100), codes_of(3, 50)]
    gather.arrived("weight", place)

    def allocated() -> Any:
        return gather.allocate((13,), dtype=torch.uint8, device=CPU)

    gather.send("weight", codes)  # no forward of the model runs
    assert not isinstance(allocated(), StandIn)
    gather.begin(CPU)
    gather.send("another", codes)
    assert not isinstance(allocated(), StandIn)
    gather.send("weight", codes)
    buffer = allocated()
    assert isinstance(buffer, StandIn) and buffer.shape == (13,)
    buffer.contents.tensors += [others[0], codes, others[1]]
    version = place._version
    assert gather(buffer, None, group, async_op=True) is None
    assert torch.equal(place, codes) and place._version == version
    out = [torch.empty(1, one.numel(), dtype=torch.uint8) for one in (others[0], codes, others[1])]
    buffer.contents.copy_out(out)
    assert torch.equal(out[0][0], others[0]) and torch.equal(out[2][0], others[1])
    assert not isinstance(allocated(), StandIn)  # the next weight is sent again


class Stream:
    """Of a GPU, as far as a gather uses one."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_event(self) -> str:
        return "taken"

    def wait_event(self, event: str) -> None:
        self.log.append(f"waits until {event}")

    def wait_stream(self, other: Any) -> None:
        self.log.append("waits for the model")


def test_the_memory_of_the_next_block_is_taken_in_the_stream_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second forward on, which knows what comes next; its gather waits for that alone."""
    from narrowcast.distributed.gather_in_place import GatherInPlace, _Gathered

    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    gather = GatherInPlace()
    blocks = [[torch.empty(5)], [torch.empty(7), torch.empty(2)]]

    def forward() -> list[bool]:
        """Gather and compute; whether the second block had its memory before it was gathered."""
        log.clear()
        for place in [one for block in blocks for one in block]:
            place.untyped_storage().resize_(0)
        gather.begin(torch.device("cuda"))
        taken = []
        for block in blocks:
            taken.append(all(one.untyped_storage().size() == one.nbytes for one in block))
            gather._take(block)
            assert all(one.untyped_storage().size() == one.nbytes for one in block)
            gathered = _Gathered(gather)
            gathered.places = block
            gathered.copy_out([])
        return taken

    assert forward() == [False, False] and log == ["waits for the model"] * 2
    assert forward() == [False, True] and log == ["waits for the model", "waits until taken"]
    blocks.reverse()  # another order: what was taken is mistaken
    assert forward() == [False, False] and log == ["waits for the model"] * 2
