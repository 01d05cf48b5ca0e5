"""Several processes on one machine that talk through gloo."""

from __future__ import annotations

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
    processes = mp.spawn(work, args=(str(folder),), nprocs=world, join=False)
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
