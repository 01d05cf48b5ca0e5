"""Which rows of an option matrix to run so that every two values (or each one) that can meet do meet: covering arrays.

Most faults of a combination come from one or two of its values (Kuhn, Wallace, Gallo: Software Fault Interactions and
Implications for Software Testing, 2004).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from typing import Any


def values_that_meet(row: Sequence[Hashable], strength: int = 2) -> set[Any]:
    """Every ``strength`` values of a row with their positions; all of them, where a row has fewer."""
    positions = itertools.combinations(range(len(row)), min(strength, len(row)))
    return {tuple((i, row[i]) for i in chosen) for chosen in positions}


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Indices, ascending, of rows that together hold every ``strength`` values which any row holds.

    Greedy: always the row that adds most, of equals the first. Combinations that cannot exist are left out of
    ``rows``; values that meet only in them need not be covered.
    """
    held = [values_that_meet(row, strength) for row in rows]
    missing = set().union(*held)
    # What a row adds only ever shrinks, so a row that still leads after a recount is the best.
    heap = [(-len(values), index) for index, values in enumerate(held)]
    heapq.heapify(heap)
    chosen: list[int] = []
    while missing:
        _, index = heapq.heappop(heap)
        gain = -len(held[index] & missing)
        if heap and (gain, index) > heap[0]:
            heapq.heappush(heap, (gain, index))
            continue
        missing -= held[index]
        chosen.append(index)
    return sorted(chosen)
