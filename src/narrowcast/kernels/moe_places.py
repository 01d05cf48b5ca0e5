"""The places of a mixture's rows: two launches where tokens leave and one where they arrive, for any routing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .grouped_padding import raw
from .launch import Launcher, check_device, is_traced

ENTRIES = 16384  # of the routing map in a program
MOST_TOKENS = 256
BLOCKS = 16  # whose counts are added up at once
FILLED = 1024
ROWS = 256
COMPARED = 8192  # rows times chunks in a program


@triton.jit(do_not_specialize=["T", "experts"])
def _moe_count_kernel(map_ptr, counts_ptr, T, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)
    inside = (token < T) & (expert < experts)[None, :]
    chosen = tl.load(map_ptr + token.to(tl.int64) * experts + expert[None, :], mask=inside, other=0) != 0
    tl.store(
        counts_ptr + block * experts + expert, tl.sum(chosen.to(tl.int32), axis=0), mask=expert < experts
    )


@triton.jit(do_not_specialize=["T", "experts", "blocks", "ranks", "capacity", "rows"])
def _moe_departures_kernel(
    map_ptr,
    counts_ptr,
    row_map_ptr,
    positions_ptr,
    fitting_ptr,
    T,
    experts,
    blocks,
    ranks,
    capacity,
    rows,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILLED: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    totals = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, BLOCKS):
        one = start + tl.arange(0, BLOCKS)[:, None]
        known = (one < blocks) & (expert < experts)[None, :]
        counts = tl.load(counts_ptr + one * experts + expert[None, :], mask=known, other=0)
        totals += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(one < block, counts, 0), axis=0)
    ends = tl.cumsum(totals, axis=0)
    rank = expert // (experts // ranks)
    # where the copies of each expert's rank begin; and what no copy has among this program's share of the places
    begins = tl.zeros([EXPERTS], tl.int32)
    share = tl.cdiv(capacity, blocks)
    for r in range(ranks):
        copies = tl.sum(tl.where(rank == r, totals, 0), axis=0)
        begins = tl.where(rank > r, begins + copies, begins)
        last = tl.minimum((block + 1) * share, capacity)
        for start in range(block * share, last, FILLED):
            place = start + tl.arange(0, FILLED)
            unnamed = (place >= copies) & (place < last)
            tl.store(positions_ptr + r * capacity + place, tl.full([FILLED], -1, tl.int32), mask=unnamed)
    if block == 0:
        fitting = tl.minimum(ends - begins, capacity) - tl.minimum(ends - totals - begins, capacity)
        tl.store(fitting_ptr + expert, fitting.to(tl.int64), mask=expert < experts)
    token = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = (token < T) & (expert < experts)[None, :]
    entry = token * experts + expert[None, :]
    chosen = (tl.load(map_ptr + entry, mask=inside, other=0) != 0).to(tl.int32)
    number = (ends - totals + before)[None, :] + tl.cumsum(chosen, axis=0) - chosen
    place = number - begins[None, :]
    fits = (chosen != 0) & (place < capacity)
    place += (rank * capacity)[None, :]
    tl.store(row_map_ptr + entry, tl.where(fits & (number < rows), place, -1), mask=inside)
    tl.store(positions_ptr + place, tl.where(number < rows, entry, -1), mask=fits)


@triton.jit(do_not_specialize=["ranks", "experts", "capacity", "rows", "places", "alignment"])
def _moe_arrivals_kernel(
    received_ptr,
    source_ptr,
    positions_ptr,
    sizes_ptr,
    ranks,
    experts,
    capacity,
    rows,
    places,
    alignment,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    rank = tl.arange(0, RANKS)
    expert = tl.arange(0, EXPERTS)
    known = (rank < ranks)[:, None] & (expert < experts)[None, :]
    size = tl.load(received_ptr + rank[:, None] * experts + expert[None, :], mask=known, other=0).to(tl.int32)
    of_rank = tl.sum(size, axis=1)
    first = tl.where(capacity > 0, rank * capacity, tl.cumsum(of_rank, axis=0) - of_rank)
    place = first[:, None] + tl.cumsum(size, axis=1) - size
    padded = tl.cdiv(tl.sum(size, axis=0), alignment) * alignment
    begin = (tl.cumsum(padded, axis=0) - padded)[None, :] + tl.cumsum(size, axis=0) - size
    if tl.program_id(0) == 0:
        tl.store(sizes_ptr + expert, padded.to(tl.int64), mask=expert < experts)
    # A row is in one chunk at most, so a sum over the chunks finds it.
    size = tl.reshape(size, [1, RANKS * EXPERTS])
    place = tl.reshape(place, [1, RANKS * EXPERTS])
    begin = tl.reshape(begin, [1, RANKS * EXPERTS])
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offset = row[:, None] - begin
    found = tl.sum(tl.where((offset >= 0) & (offset < size), offset + place + 1, 0), axis=1) - 1
    tl.store(source_ptr + row, found, mask=row < rows)
    offset = row[:, None] - place
    found = tl.sum(tl.where((offset >= 0) & (offset < size), offset + begin + 1, 0), axis=1) - 1
    tl.store(positions_ptr + row, tl.where(found < rows, found, -1), mask=row < places)


_count = Launcher(_moe_count_kernel, num_warps=8)
_departures = Launcher(_moe_departures_kernel, num_warps=8)
_arrivals = Launcher(_moe_arrivals_kernel, num_warps=4)


def departures(routing_map: Tensor, ranks: int, capacity: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.moe_places.departures``."""
    check_device(routing_map)
    if routing_map.dtype == torch.bool and is_traced(routing_map):
        routing_map = routing_map.to(torch.uint8)  # Inductor reads no bool as a byte, and fuses this
    source = raw(routing_map)
    (T, experts), device = source.shape, source.device
    row_map = torch.empty((T, experts), dtype=torch.int32, device=device)
    positions = torch.empty(ranks * capacity, dtype=torch.int32, device=device)
    fitting = torch.empty(experts, dtype=torch.int64, device=device)
    width = triton.next_power_of_2(max(experts, 1))
    tokens = min(max(ENTRIES // width, 1), MOST_TOKENS)
    blocks = max(cdiv(T, tokens), 1)
    counts = torch.empty((blocks, experts), dtype=torch.int32, device=device)
    _count((blocks, 1, 1), (source, counts, T, experts), (tokens, width))
    _departures(
        (blocks, 1, 1),
        (source, counts, row_map, positions, fitting, T, experts, blocks, ranks, capacity, rows),
        (tokens, width, BLOCKS, FILLED),
    )
    return row_map, positions, fitting


def arrivals(
    received: Tensor, capacity: int, rows: int, places: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.moe_places.arrivals``."""
    check_device(received)
    (ranks, experts), device = received.shape, received.device
    source = torch.empty(rows, dtype=torch.int32, device=device)
    positions = torch.empty(places, dtype=torch.int32, device=device)
    sizes = torch.empty(experts, dtype=torch.int64, device=device)
    height, width = triton.next_power_of_2(ranks), triton.next_power_of_2(experts)
    block = min(max(COMPARED // (height * width), 1), ROWS)
    _arrivals(
        (max(cdiv(max(rows, places), block), 1), 1, 1),
        (
            received.contiguous(), source, positions, sizes, ranks, experts, capacity, rows, places, alignment,
        ),
        (height, width, block),
    )  # fmt: skip
    return source, positions, sizes
