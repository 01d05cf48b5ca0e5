"""Benchmarks of several GPUs: one process for each, as ``torchrun`` starts them."""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from .machine import Row
from .report import report, runs_on_gpu
from .timing import seconds_of


def report_of_ranks(stem: str, measure: Callable[[Namespace], list[Row]], chosen: Namespace) -> None:
    """Measure in every process and report in the first; without processes, say how to start them."""
    tiny = getattr(chosen, "tiny", False)  # a trial of the script on a CPU
    if not tiny and not runs_on_gpu(chosen):
        return
    if "LOCAL_RANK" not in os.environ:
        print(f"this benchmark needs two GPUs: torchrun --nproc-per-node 2 benchmarks/bench_{stem}.py")
        return
    if tiny:
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    rows = measure(chosen)
    if dist.get_rank() == 0:
        report(stem, rows, chosen)
    dist.destroy_process_group()


def rank_ms(step: Callable[[], object], count: int) -> float:
    """Mean milliseconds of ``count`` steps of this rank, after one that all ranks begin together.

    The first finds nothing queued, as no step of a training does, and is not counted.
    """
    if not torch.cuda.is_available():
        dist.barrier()
        return 1e3 * seconds_of(step, count, "cpu")
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def is_late(began: float, budget: float) -> bool:
    """Whether any process has spent its seconds since ``began``, by ``time.monotonic``; the same answer in all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    late = torch.tensor(float(time.monotonic() - began > budget), device=device)
    dist.all_reduce(late)
    return bool(late.item())


def rows_in_turns(contenders: Iterable[Callable[[list[Row]], Row]], budget: float) -> list[Row]:
    """Return a row of each contender that starts within ``budget`` seconds, and print it; each gets those before."""
    rows: list[Row] = []
    began = time.monotonic()
    for contender in contenders:
        if is_late(began, budget):
            break
        rows.append(contender(rows))
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - began:.0f} s", rows[-1], flush=True)
    return rows


def train_in_turns(contenders: Mapping[str, Callable[[], Row]], budget: float) -> list[Row]:
    """Return a row for each contender that starts within ``budget`` seconds; its rate is compared with the first's."""

    def compared(name: str, timed: Callable[[], Row], rows: list[Row]) -> Row:
        row: Row = {"contender": name, "GPUs": dist.get_world_size(), **timed()}
        torch.compiler.reset()
        first = rows[0] if rows else row
        return {**row, "vs bf16": round(row["tokens/s/GPU"] / first["tokens/s/GPU"], 3)}  # type: ignore[operator]

    return rows_in_turns((partial(compared, *contender) for contender in contenders.items()), budget)
