"""Several processes on one machine that talk through gloo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp


def run_ranks(work: Callable[[int, str], None], folder: Path, world: int, seconds: int) -> list[Any]:
    """Run ``work(rank, folder)`` in ``world`` processes; what each saved as ``folder/rank<rank>.pt``.

    The test fails, and the processes are killed, when they have not finished after so many seconds.
    """
    processes = mp.spawn(_rank, args=(work, str(folder)), nprocs=world, join=False)
    assert processes is not None
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(timeout=1):
            if time.monotonic() > deadline:
                pytest.fail(
                    f"{world} ranks did not finish within {seconds} s: their collectives do not match"
                )
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def _rank(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    """The work, and then the end of the process at once: threads of gloo may abort an interpreter that shuts down."""
    work(rank, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
