"""``GatherInPlace``: FSDP2's all-gather of weights that are gathered quantized, without its copies.

FSDP2 copies what it sends into one buffer, and every weight out of the gathered one, in the stream of the model. Here
codes travel from where they lie to where layers read them. The memory there is FSDP2's, taken from the allocator for
the stream of the model and given back after each block, so nothing may arrive before that stream is through with it.
FSDP2's forward gathers a block when the one before was launched; for it to arrive meanwhile, its memory is taken before
that launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..functional.collectives import all_gather_single
from ..state import starts_a_step
from ..upstream.autograd import version_preserved
from ..upstream.c10d import run_together
from .stand_in import Contents, StandIn


class GatherInPlace:
    """For ``FSDPModule.set_custom_all_gather`` of the modules of one model."""

    def __init__(self) -> None:
        # FSDP2's memory of the codes of a whole weight, by its ``WeightGather``
        self._places: dict[Any, Tensor] = {}
        self._sent: dict[int, Tensor] = {}  # those places by the address of what this rank gives
        # by a block's first place, the places of the block after it
        self._next: dict[int, list[Tensor]] = {}
        self._last: int | None = None  # first place of the block that this forward gathered last
        self._ready: tuple[int, Any] | None = None  # first place of a block whose memory is taken; since when
        self._begun = False
        self._stream: Any = None  # the model's stream, on a GPU

    def __deepcopy__(self, memo: Any) -> GatherInPlace:
        """Return itself: compiled code guards a copy of what a sharded weight holds."""
        return self

    def begin(self, device: torch.device) -> None:
        """A forward of the model begins."""
        self._last, self._ready, self._begun = None, None, True
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def send(self, weight: Any, codes: Tensor) -> None:
        """A shard's codes will be gathered next."""
        if self._begun and weight in self._places:
            self._sent[codes.data_ptr()] = self._places[weight]

    def arrived(self, weight: Any, codes: Tensor) -> None:
        """A whole weight's codes were copied, the first time, to where they will always be."""
        self._places[weight] = codes

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a stand-in for the gathered weights, once there is a place for one."""
        if dtype == torch.uint8 and self._sent:
            return StandIn(_Gathered(self), size, dtype, device)
        self._sent.clear()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather in the stream that this runs in: codes to their places, all else together."""
        if not isinstance(output_tensor, StandIn):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        gathered: Any = output_tensor.contents
        places = [self._sent.get(one.data_ptr()) for one in gathered.tensors]
        self._sent.clear()
        gathered.places = [place for place in places if place is not None]
        if gathered.places:
            self._take(gathered.places)
        pairs = [
            (p.view(-1).view(torch.uint8), one) for p, one in zip(places, gathered.tensors) if p is not None
        ]
        gathered.others = [index for index, place in enumerate(places) if place is None]
        if gathered.others:
            gathered.given = torch.cat([gathered.tensors[index] for index in gathered.others])
            gathered.got = gathered.given.new_empty(group.size(), gathered.given.numel())
            pairs.append((gathered.got.view(-1), gathered.given))
        # gloo writes when it counts as a change of the weight
        async_op = async_op and self._stream is not None
        counted = tuple(place for place, _ in pairs if not place.is_inference())
        starts = [
            functools.partial(all_gather_single, place, one, group=group, async_op=async_op)
            for place, one in pairs
        ]
        with version_preserved(counted):
            return run_together(starts, group, async_op)

    def _take(self, places: list[Tensor]) -> None:
        """Give memory to the places of a block, and wait until the stream of the model is through with it."""
        first, ready, self._ready = id(places[0]), self._ready, None
        if starts_a_step():
            if self._last is not None:
                self._next[self._last] = places
            self._last = first
        if self._stream is None:
            _allocate(places)
        elif starts_a_step() and ready is not None and ready[0] == first:
            torch.cuda.current_stream().wait_event(ready[1])
        else:  # in a backward, which gathers a block before the one before it is launched, or mistaken
            with torch.cuda.stream(self._stream):
                _allocate(places)
            torch.cuda.current_stream().wait_stream(self._stream)

    def take_next(self, places: list[Tensor]) -> None:
        """Give memory to what the last forward gathered behind these; in the stream of the model."""
        following = self._next.get(id(places[0]))
        if self._stream is not None and starts_a_step() and following is not None:
            _allocate(following)
            self._ready = id(following[0]), torch.cuda.current_stream().record_event()


class _Gathered(Contents):
    """Weights on their way: places, and what has none."""

    def __init__(self, gather: GatherInPlace) -> None:
        super().__init__()
        self.gather = gather
        self.places: list[Tensor] = []
        self.others: list[int] = []
        self.given: Any = None
        self.got: Any = None

    def copy_out(self, out: list[Tensor]) -> None:
        if self.others:
            sizes = [self.tensors[index].numel() for index in self.others]
            torch.split_with_sizes_copy(self.got, sizes, dim=1, out=[out[index] for index in self.others])
        if self.places:
            self.gather.take_next(self.places)


def _allocate(places: list[Tensor]) -> None:
    """Allocate as FSDP2 does, which then finds it done."""
    for place in places:
        storage = place.untyped_storage()
        if storage.size() != place.nbytes:
            storage.resize_(place.nbytes)
