"""Saves and loads of sharded checkpoints on CPUs, beside those of another state of the package.

Each state has processes of its own, which talk through gloo and wait while the other's save: states take turns, and
what else the machine does meets both. Seconds are those of the slowest rank, CPU seconds those of all ranks, of the
user and of the system.

    git archive cad8ec43 src | tar -x -C /tmp/old
    python benchmarks/bench_checkpoint.py --old /tmp/old/src
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, by_turns, parser, report

import narrowcast as nc

NEW = Path(__file__).parents[1] / "src"
LAYOUTS = ("fsdp2", "ddp")


def work(rank: int, chosen: argparse.Namespace) -> None:
    """Be a rank: save or load for each line read, and answer with wall and CPU seconds."""
    torch.set_num_threads(chosen.threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{chosen.folder}/store", rank=rank, world_size=chosen.ranks
    )
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        *(nc.LayerNormMLP(chosen.hidden, 4 * chosen.hidden, device="cpu") for _ in range(chosen.layers))
    )
    nc.set_recipe(model, nc.recipe.DelayedScaling())
    called = model
    if chosen.layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        called = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    called(torch.ones(8, chosen.hidden)).sum().backward()
    nc.reduce_delayed_scaling(model, dist.group.WORLD)
    optimizer.step()
    optimizer.zero_grad()
    place = f"{chosen.folder}/saved"
    print("ready", flush=True)
    for line in sys.stdin:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        if line.strip() == "save":
            nc.distributed.save_checkpoint(place, model, optimizer)
        else:
            nc.distributed.load_checkpoint(place, model, optimizer)
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


class Ranks:
    """The processes of one state of the package."""

    def __init__(self, source: Path, folder: Path, layout: str, chosen: argparse.Namespace) -> None:
        folder.mkdir(parents=True)
        command = [sys.executable, __file__, "--folder", str(folder), "--layout", layout]
        for name in ("ranks", "layers", "hidden", "threads"):
            command += [f"--{name}", str(getattr(chosen, name))]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(chosen.threads)}
        self.processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            )
            for rank in range(chosen.ranks)
        ]  # fmt: skip

    def answers(self) -> list[str]:
        return [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]

    def run(self, what: str) -> tuple[float, float]:
        """Return wall seconds of the slowest rank and CPU seconds of all."""
        for process in self.processes:
            print(what, file=process.stdin, flush=True)
        walls, cpus = zip(*(map(float, answer.split()) for answer in self.answers()))
        return max(walls), sum(cpus)

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait()


def measure(chosen: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for layout in [one for one in LAYOUTS if chosen.only in one]:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            sources = {"old": chosen.old, "new": NEW} if chosen.old else {"new": NEW}
            states = {
                name: Ranks(source, Path(folder, name), layout, chosen) for name, source in sources.items()
            }
            for state in states.values():
                state.answers()
            for what in ("save", "load"):
                runs = {name: partial(state.run, what) for name, state in states.items()}
                rows += rows_of(layout, what, by_turns(runs, chosen.pairs))
            for state in states.values():
                state.end()
    return rows


def rows_of(layout: str, what: str, times: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Return a row for each state, with what the last takes of the time of the first."""
    rows: list[Row] = []
    for name, found in times.items():
        row: Row = {"layout": layout, "what": what, "state": name, "pairs": len(found)}
        for number, clock in enumerate(("s", "cpu_s")):
            own, first = ([one[number] for one in times[of]] for of in (name, next(iter(times))))
            row[clock], row[f"{clock}_min"] = statistics.median(own), min(own)
            if name != next(iter(times)):
                row[f"{clock}_times"] = statistics.median(a / b for a, b in zip(own, first))
                row[f"{clock}_min_times"] = min(own) / min(first)
        rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--old", type=Path, help="the folder `src` of another state")
    options.add_argument("--pairs", type=int, default=7, help="counted saves and loads of each state")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--layers", type=int, default=24, help="blocks of 8 hidden^2 parameters in fp32")
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--threads", type=int, default=1, help="of each rank")
    options.add_argument("--folder", help="where checkpoints are written (default: the temporary folder)")
    options.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options.set_defaults(device="cpu")
    chosen = options.parse_args()
    if chosen.rank is not None:
        work(chosen.rank, chosen)
    else:
        report("checkpoint", measure(chosen), chosen)


if __name__ == "__main__":
    main()
