"""Places of a mixture's rows, where they leave and where they arrive: those of kernels, of the reference, by hand."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh

from narrowcast import kernels
from narrowcast.reference import moe_places as reference

# tokens, experts, ranks, capacity, rows
LEAVING = [
    (5, 4, 2, 3, 20),
    (700, 6, 3, 250, 5000),
    (700, 6, 3, 2000, 1301),
    (63, 8, 1, 90, 90),
    (1, 1, 1, 1, 1),
    (0, 4, 2, 7, 1),
    (1000, 40, 4, 1100, 4000),
]


def by_hand(
    routing: list[list[bool]], ranks: int, capacity: int, rows: int
) -> tuple[list[list[int]], list[int]]:
    experts = len(routing[0]) if routing else 0
    places, counts, number = [[-1] * experts for _ in routing], [0] * experts, 0
    for rank in range(ranks):
        taken = 0
        for expert in range(rank * experts // ranks, (rank + 1) * experts // ranks):
            for token, of_token in enumerate(routing):
                if of_token[expert]:
                    if taken < capacity:
                        counts[expert] += 1
                        if number < rows:
                            places[token][expert] = rank * capacity + taken
                    taken += 1
                    number += 1
    return places, counts


@pytest.mark.parametrize("case", LEAVING, ids=str)
def test_departures(case: tuple[int, ...], device: torch.device) -> None:
    tokens, experts, *options = case
    routing = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)) < 0.4
    for given in (routing, routing.int() * 3):
        ours = kernels.moe_places.departures(given.to(device), *options)
        theirs = reference.departures(given, *options)
        assert_fresh([*ours], [given.to(device)])
        for one, other, name in zip(ours, theirs, ("row map", "positions", "counts"), strict=True):
            assert_bitwise(one, other, name)
    places, counts = by_hand(routing.tolist(), *options)
    assert theirs[0].tolist() == places
    if tokens:
        assert theirs[2].tolist() == counts
    named = {place: at for at, place in enumerate(theirs[0].flatten().tolist()) if place >= 0}
    assert theirs[1].tolist() == [named.get(place, -1) for place in range(options[0] * options[1])]


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("capacity", [0, 60])
@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (3, 5), (5, 9)], ids=str)
def test_arrivals(shape: tuple[int, int], capacity: int, alignment: int, device: torch.device) -> None:
    ranks, experts = shape
    generator = torch.Generator().manual_seed(ranks)
    received = torch.randint(0, 2 * 60 // experts + 2, shape, generator=generator)
    received[-1, 0] = received[0, -1] = 0
    if capacity:
        fitting = received.cumsum(1).clamp(max=capacity)
        received = torch.diff(fitting, prepend=fitting.new_zeros(ranks, 1))
    places = ranks * capacity or int(received.sum())
    rows = places + experts * (alignment - 1) + 3
    ours = kernels.moe_places.arrivals(received.to(device), capacity, rows, places, alignment)
    theirs = reference.arrivals(received, capacity, rows, places, alignment)
    for one, other, name in zip(ours, theirs, ("places", "rows", "sizes"), strict=True):
        assert_bitwise(one, other, name)
    expected: list[int] = []
    for expert in range(experts):
        for rank in range(ranks):
            before = rank * capacity if capacity else int(received[:rank].sum())
            before += int(received[rank, :expert].sum())
            expected += range(before, before + int(received[rank, expert]))
        expected += [-1] * (-int(received[:, expert].sum()) % alignment)
    assert theirs[0].tolist() == expected + [-1] * (rows - len(expected))
    assert theirs[2].sum() == len(expected)
    back = {place: row for row, place in enumerate(theirs[0].tolist()) if place >= 0}
    assert theirs[1].tolist() == [back.get(place, -1) for place in range(places)]
