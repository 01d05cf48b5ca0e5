"""Clocks: steps in a row, or contenders in turns over a ring of inputs larger than the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .machine import Row

RING_BYTES = 512 * 2**20  # several times the last-level cache
LAUNCHES = 4  # per turn
UNCOUNTED_TURNS = 2
# Long enough for the host to queue a turn's launches behind it, so that its time stays out of the events.
QUEUE_CYCLES = 4_000_000
T = TypeVar("T")


def seconds_of(step: Callable[[], object], count: int, device: str = "cuda") -> float:
    """Mean seconds of ``count`` steps issued one after the other, the host's time included."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count


def spread(times: Sequence[float], unit: str) -> Row:
    """Median, 20th and 80th percentile as columns ``p50_<unit>``, ``p20_<unit>``, ``p80_<unit>``."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {
        f"p50_{unit}": statistics.median(times),
        f"p20_{unit}": fifths[0],
        f"p80_{unit}": fifths[3],
    }


def by_turns(runs: Mapping[str, Callable[[], T]], count: int) -> dict[str, list[T]]:
    """What ``count`` calls of each return, in turns that change their order; a first turn is not counted."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    for turn in range(-1, count):
        for name in [*runs][:: 1 if turn % 2 else -1]:
            found[name].append(runs[name]())
    return {name: returned[1:] for name, returned in found.items()}


def rates(where: Row, times: Mapping[str, Sequence[float]], operations: int) -> list[Row]:
    """One row per contender from microseconds per launch; the first is the yardstick."""
    yardstick = statistics.median(next(iter(times.values())))
    rows: list[Row] = []
    for name, values in times.items():
        median = statistics.median(values)
        row: Row = {**where, "contender": name}
        row |= {key: round(float(str(value)), 2) for key, value in spread(values, "us").items()}
        row |= {"TFLOP/s": round(operations / (median * 1e6), 1), "share": round(median / yardstick, 3)}
        rows.append(row)
    return rows


def ring(make: Callable[[], tuple[Any, ...]], size: int = RING_BYTES) -> list[tuple[Any, ...]]:
    """Independent inputs, so many that their first tensors together are larger than the cache; at least two."""
    first = make()
    count = max(2, -(-size // max(first[0].nbytes, 1)))
    return [first, *(make() for _ in range(count - 1))]


def time_in_turns(
    contenders: Mapping[str, Callable[..., object]],
    inputs: Sequence[tuple[Any, ...]],
    repeats: int,
    *,
    device: str = "cuda",
    launches: int = LAUNCHES,
    queued: bool = True,
) -> dict[str, list[float]]:
    """Microseconds per launch of every contender, one value per round.

    A contender is called with the tensors of one input; consecutive launches take consecutive inputs of the ring.
    ``queued`` keeps the host's time out of what is measured, as long as the launches of a turn fit in the queue.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    position = 0
    for turn in range(repeats + UNCOUNTED_TURNS):
        for name, run in contenders.items():
            chosen = [inputs[(position + launch) % len(inputs)] for launch in range(launches)]
            position += launches

            def launch_all(run: Callable[..., object] = run, chosen: list[tuple[Any, ...]] = chosen) -> None:
                for tensors in chosen:
                    run(*tensors)

            elapsed = _cuda_us(launch_all, queued) if device == "cuda" else _cpu_us(launch_all)
            if turn >= UNCOUNTED_TURNS:
                times[name].append(elapsed / launches)
    return times


def _cuda_us(run: Callable[[], object], queued: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued:
        torch.cuda._sleep(QUEUE_CYCLES)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _cpu_us(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
