"""The processes that `torchrun` started, and what each of them does of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowcast as nc

from .. import _environment as environment
from .config import TrainConfig
from .errors import SettingsError
from .folder import run_folder

MODES = ("fsdp",)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one by itself is all of them.

    Args:
        mode: a name of `MODES`; empty for one process.
        rank: this process.
        count: how many there are.
        mesh: over which parameters are sharded, and the batch split.
    """

    mode: str = ""
    rank: int = 0
    count: int = 1
    mesh: Any = None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def shard(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        """Keep this rank's part of each parameter; weights are gathered as codes where the recipe allows it."""
        if self.mode:
            nc.distributed.shard(model, self.mesh, blocks=blocks)

    def part(self, batch: Tensor) -> Tensor:
        """Return the rows of a batch that this rank runs."""
        return batch.tensor_split(self.count)[self.rank]

    def average(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks of the losses of their rows."""
        if self.mode:
            dist.all_reduce(loss)
        return loss / self.count

    def sums_gradients(self, model: Any, last: bool) -> None:
        """Say whether the next backward is the last of a step, which sums the gradients of the ranks."""
        if self.mode:
            model.set_requires_gradient_sync(last)

    def told(self, value: Any) -> Any:
        """Return the value that the first rank has."""
        if not self.mode:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


ALONE = Ranks()


def require_ranks(config: TrainConfig, mode: str | None, *, command: str) -> None:
    """Check that the processes of this command are those that `--parallel` needs.

    Args:
        config: the run's settings.
        mode: what `--parallel` says; None where it is not given.
        command: as it was typed, for the message.

    Raises:
        SettingsError: an unknown mode, no `torchrun` or one without `--parallel`, or settings that do not go with it.
    """
    count = _number("WORLD_SIZE")
    if mode is None:
        if count is not None and count > 1:
            raise SettingsError(
                f"torchrun started {count} processes, and --parallel is not given; add --parallel {MODES[0]}"
            )
        return
    if mode not in MODES:
        raise SettingsError(f"unknown mode {mode!r}; --parallel takes {', '.join(MODES)}")
    if not dist.is_available():
        raise SettingsError("--parallel needs a PyTorch with torch.distributed; leave --parallel out")
    if dist.is_initialized():
        count = dist.get_world_size()
    elif count is None or _number("RANK") is None:
        raise SettingsError(
            f"--parallel {mode} needs the processes of torchrun; run: torchrun --nproc-per-node 2 -m {command}"
        )
    if config.graphs:
        raise SettingsError(
            f"--graphs replays one process's step, and --parallel {mode} communicates in it; leave --graphs out"
        )
    if config.compile and not config.by_block:
        raise SettingsError(
            f"--parallel {mode} communicates between blocks, which no graph of the whole model holds; "
            "add --by-block, or leave --compile out"
        )
    if config.part_size % count:
        parts = f" in --accumulate {config.accumulate} parts" if config.accumulate > 1 else ""
        raise SettingsError(
            f"--batch-size is {config.batch_size}{parts}; for {count} processes it must be a multiple of "
            f"{count * config.accumulate}"
        )


@contextmanager
def joined(config: TrainConfig, mode: str | None) -> Iterator[Ranks]:
    """Join the processes of the run, which `require_ranks` has found there.

    Raises:
        SettingsError: this machine has fewer GPUs than processes.
    """
    if mode is None:
        yield ALONE
        return
    from torch.distributed.device_mesh import init_device_mesh

    joins = not dist.is_initialized()
    if joins:
        if config.device == "cuda":
            local, there = _number("LOCAL_RANK") or 0, torch.cuda.device_count()
            if local >= there:
                raise SettingsError(
                    f"torchrun started at least {local + 1} processes here, and there are {there} GPUs; "
                    f"give --nproc-per-node {there}"
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
    count = dist.get_world_size()
    yield Ranks(mode, dist.get_rank(), count, init_device_mesh(config.device, (count,)))
    if joins:  # not after an error, when other ranks may be waiting for this one: torchrun ends them
        dist.destroy_process_group()


@contextmanager
def folder_of_all(out: Path | None, ranks: Ranks, *, resume: bool) -> Iterator[Path]:
    """Hold the folder of a run, which the first rank finds or makes; `run_folder` says what is raised, on all ranks."""
    with ExitStack() as held:
        found: Path | SettingsError | None = None
        if ranks.first:
            try:
                found = held.enter_context(run_folder(out, resume=resume))
            except SettingsError as error:
                found = error
        found = ranks.told(found)
        if isinstance(found, SettingsError):
            raise found
        assert found is not None
        yield found


def _number(name: str) -> int | None:
    """The value of a variable that `torchrun` sets."""
    text = environment.read_foreign(name)
    return int(text) if text is not None and text.isdecimal() else None
