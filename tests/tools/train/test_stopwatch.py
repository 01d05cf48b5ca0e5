"""Speed counts only what lies between start and stop."""

from __future__ import annotations

import time

import pytest

from narrowcast_tools.train.stopwatch import Stopwatch


def test_tokens_per_timed_second(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 50.0, 53.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    watch = Stopwatch()
    assert watch.tokens_per_second == 0.0
    watch.stop(999)  # never started: the first step of a run
    watch.start()
    watch.start()
    watch.stop(100)
    watch.start()
    watch.stop(400)
    assert watch.tokens_per_second == 100.0
