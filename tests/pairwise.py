"""Which rows of an option matrix to run so that every two values that can meet do meet.

Most faults of a combination come from two of its values (Kuhn, Wallace, Gallo: Software Fault Interactions, 2004).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence

Pair = tuple[int, int, Hashable, Hashable]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Every two values of a row, with their positions; of a row of one value, that value with itself."""
    positions = list(itertools.combinations(range(len(row)), 2)) or [(i, i) for i in range(len(row))]
    return {(i, j, row[i], row[j]) for i, j in positions}


def pairwise(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices, ascending, of rows that together hold every pair of values which any row holds.

    Greedy: always the row with the most pairs not held yet, of equals the first. Combinations that cannot exist are
    left out of ``rows``; a pair that is only in them need not be covered.
    """
    missing = set().union(*map(pairs, rows))
    # How many missing pairs a row has only ever falls, so a row that still leads after a recount is the best.
    heap = [(-len(pairs(row)), index) for index, row in enumerate(rows)]
    heapq.heapify(heap)
    chosen: list[int] = []
    while missing:
        _, index = heapq.heappop(heap)
        gain = -len(pairs(rows[index]) & missing)
        if heap and (gain, index) > heap[0]:
            heapq.heappush(heap, (gain, index))
            continue
        missing -= pairs(rows[index])
        chosen.append(index)
    return sorted(chosen)
