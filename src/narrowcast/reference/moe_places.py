"""Places of a mixture's copies of tokens in what a rank sends, and of rows in what an expert's rank receives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .moe import positions


def departures(routing_map: Tensor, ranks: int, capacity: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place every copy of a token: by expert, and among those of an expert in the order of tokens.

    Args:
        routing_map: bool or int32 (T, E), not zero where a token goes to an expert.
        ranks: the experts of each are E / ranks in a row.
        capacity: places of each rank; the first copies have them.
        rows: only so many copies, counted over all ranks, are placed.

    Numerics:
        Row map, int32 (T, E): the place of every copy, -1 for none; its inverse as ``moe.positions`` gives it, int32
        (ranks * capacity,); and how many of the capacity's places each expert has, int64 (E,), also for copies that
        ``rows`` leaves out.
    """
    chosen = routing_map.t().bool()
    counts = chosen.sum(1).view(ranks, -1)
    begins = (counts.sum(1).cumsum(0) - counts.sum(1)).repeat_interleave(counts.shape[1]).unsqueeze(1)
    number = (chosen.reshape(-1).cumsum(0) - 1).view(chosen.shape)
    place = number - begins
    keep = chosen & (number < rows) & (place < capacity)
    first = (capacity * torch.arange(ranks, device=chosen.device)).repeat_interleave(counts.shape[1])
    row_map = torch.where(keep, place + first.unsqueeze(1), -1).t().to(torch.int32).contiguous()
    return row_map, positions(row_map, ranks * capacity), fitting(counts, capacity).reshape(-1)


def fitting(counts: Tensor, capacity: int) -> Tensor:
    """Return how many rows of each expert have a place at its rank.

    Args:
        counts: int64 (ranks, experts), rows for each expert of each rank.
        capacity: places of each rank; those of its first experts have them.
    """
    return torch.diff(F.pad(counts.cumsum(1).clamp(max=capacity), (1, 0)))


def arrivals(
    received: Tensor, capacity: int, rows: int, places: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order by expert what came by rank.

    Args:
        received: int64 (ranks, experts), rows of each rank for each expert here, which came in this order.
        capacity: places of each rank; 0 if its rows begin where those of the one before end.
        rows: of the result.
        places: that the rows came in.
        alignment: the rows of each expert are padded to a multiple of it.

    Numerics:
        The place of every row, int32 (rows,), -1 for padding; its inverse, int32 (places,), -1 for places without a
        row; and the padded rows of each expert, int64 (experts,).
    """
    ranks, device = received.shape[0], received.device
    flat = received.reshape(-1)
    if capacity:
        starts = received.cumsum(1) - received + capacity * torch.arange(ranks, device=device).unsqueeze(1)
    else:
        starts = (flat.cumsum(0) - flat).view(received.shape)
    padding = -received.sum(0) % alignment
    # the rows of each rank for the first expert, its padding, those for the second one and so on, then what is left
    chunks = torch.cat([received, padding.unsqueeze(0)]).t().reshape(-1)
    first = F.pad(F.pad(starts, (0, 0, 0, 1), value=-1).t().reshape(-1), (0, 1), value=-1)
    ends = chunks.cumsum(0)
    row = torch.arange(rows, device=device)
    chunk = torch.searchsorted(ends, row, right=True)
    begin, origin = F.pad(ends, (1, 0))[chunk], first[chunk]
    source = torch.where(origin < 0, -1, origin + row - begin).to(torch.int32)
    return source, positions(source, places), received.sum(0) + padding
