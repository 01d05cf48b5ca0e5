"""Several processes on one machine that talk through gloo, or through NCCL with a GPU each."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int], Any]


@contextmanager
def process_group_removed() -> Iterator[None]:
    """Destroy a process group that the block creates and leaves behind."""
    before = dist.is_available() and dist.is_initialized()
    try:
        yield
    finally:
        if not before and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(work: Work, folder: Path, world: int, seconds: int, backend: str = "gloo") -> list[Any]:
    """``work(rank)`` of ``world`` processes, which are the default group: what each returns.

    The test fails, and the processes are killed, when they have not finished after so many seconds; a collective that
    waits longer than half of them fails by itself.
    """
    processes: Any = mp.start_processes(
        _rank,
        (work, str(folder), world, seconds, backend, torch.get_default_dtype()),
        world,
        join=False,
        start_method=start_method(),
    )
    clock = start_clock(processes.processes)
    try:
        while not processes.join(timeout=1):
            if clock() > seconds:
                pytest.fail(
                    f"{world} ranks did not finish within {seconds} s: their collectives do not match"
                )
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(world)]


def collect_garbage_less() -> None:
    """Leave out what was imported, and look after more objects: it took a tenth of the time of compiled tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def start_clock(processes: Any) -> Callable[[], float]:
    """Return the seconds since now; ``tools/mutants.py`` counts those in which no process runs."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin


def start_method() -> str:
    """How processes begin: forked from a server that has imported what takes long, but where CUDA may be in use."""
    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    # What compiles imports Inductor, whatever the backend.
    preloaded = ["narrowcast", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"]
    multiprocessing.set_forkserver_preload(preloaded)
    return "forkserver"


def _rank(
    rank: int, work: Work, folder: str, world: int, seconds: int, backend: str, dtype: torch.dtype
) -> None:
    faulthandler.enable()  # a rank that aborts says where
    collect_garbage_less()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # of what the package calls
    if backend == "nccl":
        torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=seconds / 2)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=patience
    )
    torch.save(work(rank), f"{folder}/rank{rank}.pt")
    dist.barrier()
    if backend == "nccl":
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: threads of gloo may abort an interpreter that shuts down
