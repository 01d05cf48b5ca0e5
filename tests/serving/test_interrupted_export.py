"""An export by two ranks that is killed, or whose disk is full: the folder is complete or absent, others stay whole."""

from __future__ import annotations

import datetime
import errno
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import start_method
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
RANKS, PATIENCE = 2, 120  # seconds for one export
FEW, MANY = 2, 20


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(384, 384, dtype=torch.float32) for _ in range(16))).bfloat16()
    return nc.convert(made, nc.recipe.Float8BlockScaling())


def export_together(rank: int, folder: str, room: int | None) -> None:
    """Export on every rank into ``old``, which is there, and into ``new``; write ``ready`` before, ``end`` behind.

    Args:
        room: bytes that the disk takes.
    """
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=PATIENCE / 2),
    )
    sharded: Any = fully_shard(model(), mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    dist.barrier()
    Path(folder, f"ready{rank}").touch()
    said = []
    with full_after(room) if room is not None else mock.patch.dict({}):
        for name in ("old", "new"):
            try:
                nc.export(sharded, Path(folder, "exports", name), format="hf-fp8-block128")
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    Path(folder, f"end{rank}").write_text("\n".join(said))
    os._exit(0)


def full_after(room: int) -> Any:
    """A disk that takes so many bytes: of the tensors the system takes no more, of what Python writes this does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(room, 4096), resource.RLIM_INFINITY))
    write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        left = room - sum(one.stat().st_size for one in path.parent.glob("*.safetensors"))
        if path.name == "config.json" and left < len(text):
            write(path, text[:left])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, text)

    return mock.patch.object(Path, "write_text", write_text)


def run(folder: Path, room: int | None = None, kill: Callable[[list[Any]], None] | None = None) -> list[str]:
    """Export in processes of their own; return what each said of both folders, "killed" for one without an end."""
    folder.mkdir()
    (folder / "exports").symlink_to(folder.parent / "exports")
    context: Any = multiprocessing.get_context(start_method())
    ranks = [context.Process(target=export_together, args=(rank, str(folder), room)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE
    try:
        if kill is not None:
            while not all((folder / f"ready{rank}").exists() for rank in range(RANKS)):
                assert time.monotonic() < end, "the ranks did not begin"
                time.sleep(0.002)
            kill(ranks)
        for process in ranks:
            process.join(max(end - time.monotonic(), 0))
            assert process.exitcode is not None, "a rank did not end"
    finally:
        for process in ranks:
            process.kill()
    ends = [folder / f"end{rank}" for rank in range(RANKS)]
    return [one.read_text() if one.exists() else "killed" for one in ends]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Exports:
    """A folder of exports, of which ``old`` is whole."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, 0
        (root / "exports").mkdir()
        nc.export(model(), root / "exports/old", format="hf-fp8-block128")
        self.whole = contents(root / "exports/old")
        assert self.run() == ["complete", "", ""]
        begin, end = (self.root / "run1" / name for name in ("ready0", "end0"))
        self.seconds = end.stat().st_mtime - begin.stat().st_mtime

    def run(self, **how: Any) -> list[str]:
        """Export once more; return "complete" or "absent" for ``new``, and what each rank said of it."""
        self.runs += 1
        said = run(self.root / f"run{self.runs}", **how)
        self.ended = [one != "killed" for one in said]
        assert contents(self.root / "exports/old") == self.whole
        new = self.root / "exports/new"
        state = "complete" if new.exists() else "absent"
        if new.exists():
            assert contents(new) == self.whole
            new.rename(self.root / f"new{self.runs}")
        of_old, of_new = zip(*(one.partition("\n")[::2] for one in said))
        assert all("exists and is not empty" in one for one in of_old) or "kill" in how
        return [state, *of_new]


@pytest.fixture
def exports(tmp_path: Path) -> Exports:
    return Exports(tmp_path)


COUNTS = [FEW, pytest.param(MANY, marks=[pytest.mark.requested, pytest.mark.slow])]


@pytest.mark.parametrize("times", COUNTS)
def test_killed_at_a_random_moment_an_export_is_complete_or_absent(times: int, exports: Exports) -> None:
    rng = random.Random(times)
    span = exports.seconds  # a kill after the end is drawn again
    drawn = 0
    while drawn < times:
        moment, victim = rng.random() * span, rng.randrange(RANKS)

        def kill(ranks: list[Any], moment: float = moment, victim: int = victim) -> None:
            time.sleep(moment)
            ranks[victim].kill()

        state, *_ = exports.run(kill=kill)
        if exports.ended[victim]:
            span *= 0.7
            continue
        drawn += 1
        print(
            f"kill {drawn}: rank {victim} after {moment * 1000:.0f} ms: new folder {state}, old folder whole"
        )


@pytest.mark.parametrize("times", COUNTS)
def test_a_full_disk_leaves_no_folder_and_every_rank_says_so(times: int, exports: Exports) -> None:
    rng = random.Random(times)
    total = sum(map(len, exports.whole.values()))
    config = len(exports.whole["config.json"])
    for one in range(times):
        # every fourth in the last file, which is small
        room = rng.randrange(total - config, total) if one % 4 == 1 else rng.randrange(total)
        state, *said = exports.run(room=room)
        print(f"disk full after {room} of {total} bytes: new folder {state}, old folder whole; {said[0]}")
        assert state == "absent"
        assert "No space left" in said[0] or "File too large" in said[0]
        assert (
            said[1].startswith("RuntimeError: rank 0 could not go on")
            and said[0].split(": ", 1)[1] in said[1]
        )
        assert not list((exports.root / "exports").glob(".new-*"))
