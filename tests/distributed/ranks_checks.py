"""Many checks in the processes of one spawn: each is a function of its own; one that fails hides no other."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

Check = Callable[[], Any]
PATIENCE = 240  # seconds for everything


def run_checks(
    checks_of: Callable[[str], dict[str, Check]], folder: Path, world: int
) -> list[dict[str, Any]]:
    """What the checks gave, by rank and name; of one that raised, its traceback as text.

    Args:
        checks_of: a function of a module: the folder -> the checks by name, made on every rank.
    """
    return run_ranks(functools.partial(_work, checks_of, str(folder)), folder, world, PATIENCE)


def _work(checks_of: Callable[[str], dict[str, Check]], folder: str, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, check in checks_of(folder).items():
        try:
            results[name] = check()
        except Exception:
            results[name] = traceback.format_exc()
    return results


def of_all(results: list[dict[str, Any]], name: str) -> list[Any]:
    """What a check gave on each rank; a failure of one is a failure of the test."""
    given = [result[name] for result in results]
    for rank, value in enumerate(given):
        assert not isinstance(value, str), f"on rank {rank}: {value}"
    return given


@contextlib.contextmanager
def alone_among(ranks: int, rank: int) -> Iterator[Any]:
    """A mesh of which only this rank runs: its collectives communicate nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()
