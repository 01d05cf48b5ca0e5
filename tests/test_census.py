"""The census counts something, and what it counts does not grow unnoticed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CENSUS = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "census.py"))


@pytest.mark.parametrize("count, most", [("dtype_sets", 1), ("caches", 10), ("questions", 30)])
def test_what_stands_more_than_once_gets_no_more(count, most):
    assert 0 < CENSUS[count]() <= most


def test_operators_quantize_in_few_ways():
    ways = CENSUS["ways_to_quantize"]()
    assert "_producers.encode" in ways and len(ways) <= 6


def test_counts_the_calls_of_a_step():
    def step():
        import narrowcast

        return narrowcast.formats.cdiv(3, 2)

    assert CENSUS["calls"](step) == 1
