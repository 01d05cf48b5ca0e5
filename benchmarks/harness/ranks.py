"""Benchmarks of several GPUs: one process for each, as ``torchrun`` starts them."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.distributed as dist

from .machine import Row
from .report import report, runs_on_gpu


def report_of_ranks(stem: str, measure: Callable[[Namespace], list[Row]], chosen: Namespace) -> None:
    """Measure in every process and report in the first; without processes, say how to start them."""
    if not runs_on_gpu(chosen):
        return
    if "LOCAL_RANK" not in os.environ:
        print(f"this benchmark needs two GPUs: torchrun --nproc-per-node 2 benchmarks/bench_{stem}.py")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = measure(chosen)
    if dist.get_rank() == 0:
        report(stem, rows, chosen)
    dist.destroy_process_group()


def rank_ms(step: Callable[[], object], count: int) -> float:
    """Mean milliseconds of ``count`` steps of this rank, begun when all have come here."""
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def is_late(began: float, budget: float) -> bool:
    """Whether any process has spent its seconds since ``began``, by ``time.monotonic``; the same answer in all."""
    late = torch.tensor(float(time.monotonic() - began > budget), device="cuda")
    dist.all_reduce(late)
    return bool(late.item())
