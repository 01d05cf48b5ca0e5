"""Learning rate: warmup, peak, floor."""

from __future__ import annotations

from itertools import pairwise

import pytest

from narrowcast_tools.train.schedule import learning_rate


def rates(steps: int, warmup: int) -> list[float]:
    return [learning_rate(i, peak=1.0, warmup=warmup, steps=steps) for i in range(steps)]


def test_warmup_is_linear_and_the_cosine_falls_to_a_tenth() -> None:
    all_rates = rates(100, 10)
    assert all_rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all_rates[10] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(all_rates[10:]))
    assert all_rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (5, 5), (5, 9), (3, 0)])
def test_short_runs_have_rates_too(steps: int, warmup: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(steps, warmup))
