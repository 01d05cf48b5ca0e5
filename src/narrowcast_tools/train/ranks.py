"""The processes that `torchrun` started, and what each of them does of one run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import narrowcast as nc
from narrowcast import _environment as environment

from ..words import torchrun
from .config import TrainConfig
from .errors import SettingsError
from .folder import run_folder
from .model import Block, Decoder
from .names import MODES, TP_SIZE, one_of


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one by itself is all of them.

    Args:
        mode: a name of `MODES`; empty for one process.
        rank: this process.
        count: how many there are.
        data: mesh of the ranks that split every batch, and the parameters between them; None if none do.
        tensor: mesh of the ranks that split every block, and run the same rows; None if none do.
    """

    mode: str = ""
    rank: int = 0
    count: int = 1
    data: Any = None
    tensor: Any = None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def parts(self) -> int:
        """Parts that a batch is split in."""
        return 1 if self.data is None else self.data.size()

    def shard(self, model: Decoder) -> dict[str, Tensor]:
        """Keep this rank's part of each parameter; weights are gathered as codes where the recipe allows it.

        Returns:
            the order that rows have been put in, by parameter: a rank has its part of each of the projections that
            one weight joins.
        """
        from torch.distributed.fsdp import FSDPModule

        orders = {} if self.tensor is None else _split_blocks(model, self.tensor)
        if self.data is not None:
            nc.distributed.shard(model, self.data, blocks=model.blocks)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Each rank's loss is its share in that of the batch, so that gradients have the size, and delayed
                    # scaling has the amax, that they have in one process: they are added up.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # without, gloo lacks the operation
        return orders

    def part(self, batch: Tensor) -> Tensor:
        """Return the rows of a batch that this rank runs."""
        return batch if self.data is None else batch.tensor_split(self.parts)[self.data.get_local_rank()]

    def add(self, loss: Tensor) -> Tensor:
        """Return the sum over the parts of the batch of their shares in its loss."""
        if self.data is not None:
            dist.all_reduce(loss, group=self.data.get_group())
        return loss

    def sums_gradients(self, model: Any, last: bool) -> None:
        """Mark whether the next backward is the last of a step, which sums the gradients of the ranks."""
        if self.data is not None:
            model.set_requires_gradient_sync(last)

    def told(self, value: Any) -> Any:
        """Return the value that the first rank has."""
        if not self.mode:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


ALONE = Ranks()


def require_ranks(config: TrainConfig, mode: str | None, tp_size: int | None = None, *, command: str) -> None:
    """Check that the processes of this command are those that `--parallel` needs.

    Args:
        mode: what `--parallel` says; None if it is not given.
        tp_size: what `--tp-size` says.
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
        if tp_size is not None:
            raise SettingsError(
                f"--tp-size is {tp_size}, and --parallel is not given; add --parallel fsdp+tp"
            )
        return
    one_of(MODES, mode, "--parallel")
    if not dist.is_available():
        raise SettingsError("--parallel needs a PyTorch with torch.distributed; leave --parallel out")
    if dist.is_initialized():
        count = dist.get_world_size()
    elif count is None or _number("RANK") is None:
        raise SettingsError(
            f"--parallel {mode} needs the processes of torchrun; run: {shlex.join(torchrun())} --nproc-per-node 2 "
            f"-m {command}"
        )
    if config.optimizer != "adamw":
        raise SettingsError(
            f"--optimizer {config.optimizer} is for one process; leave --parallel out, or take --optimizer adamw"
        )
    if config.graphs:
        raise SettingsError(
            "--graphs replays one process's step, and --parallel communicates in it; leave --graphs out"
        )
    if config.compile and not config.by_block:
        raise SettingsError(
            f"--parallel {mode} communicates between blocks, which no graph of the whole model holds; "
            "add --by-block, or leave --compile out"
        )
    tensor = _tp_size(mode, tp_size, count)
    for option, size in (
        ("--heads", config.model.heads),
        ("--kv-heads", config.model.kv_heads),
        ("--hidden", config.model.hidden),
    ):
        if size % tensor:
            raise SettingsError(
                f"{option} is {size}, and --parallel {mode} splits it among {tensor} processes; give it a multiple of "
                f"{tensor}, or a --tp-size that divides it"
            )
    data = count // tensor
    if config.part_size % data:
        parts = f" in --accumulate {config.accumulate} parts" if config.accumulate > 1 else ""
        raise SettingsError(
            f"--batch-size is {config.batch_size}{parts}; for {data} processes it must be a multiple of "
            f"{data * config.accumulate}"
        )


@contextmanager
def joined(config: TrainConfig, mode: str | None, tp_size: int | None = None) -> Iterator[Ranks]:
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
    tensor = _tp_size(mode, tp_size, count)
    mesh = init_device_mesh(config.device, (count // tensor, tensor), mesh_dim_names=("data", "tensor"))
    yield Ranks(
        mode,
        dist.get_rank(),
        count,
        data=mesh["data"] if "fsdp" in mode else None,
        tensor=mesh["tensor"] if "tp" in mode else None,
    )
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


def mesh_of(tensor: Any) -> Any:
    """Return what tells tensors apart that one operation cannot take together: mesh and placements; None of ordinary
    ones.
    """
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (mesh, tensor.placements)


def _split_blocks(model: Decoder, mesh: Any) -> dict[str, Tensor]:
    """Split the heads and the feed-forward layers of all blocks over a mesh; what `Ranks.shard` returns."""
    from torch.distributed.tensor.parallel import parallelize_module

    column, row = nc.distributed.ColwiseParallel, nc.distributed.RowwiseParallel
    orders = {}
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, hidden = block.attention, block.feed_forward.down.in_features
        joined = {
            "attention.qkv": [heads * attention.head_dim for heads in attention.splits],
            "feed_forward.gate_up": [hidden, hidden],
        }
        for name, sizes in joined.items():
            weight = block.get_submodule(name).get_parameter("weight")
            order = _rows_by_rank(sizes, mesh.size())
            with torch.no_grad():
                weight.copy_(weight[order.to(weight.device)])
            orders[f"blocks.{number}.{name}.weight"] = order
        plan: Any = {
            "attention.qkv": column(),
            "attention.proj": row(),
            "feed_forward.gate_up": column(),
            "feed_forward.down": row(),
        }
        parallelize_module(block, mesh, plan)
        attention.splits = [heads // mesh.size() for heads in attention.splits]
    return orders


def _rows_by_rank(sizes: list[int], ranks: int) -> Tensor:
    """Return the rows of joined weights, ordered so that equal parts of each follow rank by rank."""
    parts = [rows.chunk(ranks) for rows in torch.arange(sum(sizes)).split(sizes)]
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])


def _tp_size(mode: str, tp_size: int | None, count: int) -> int:
    """Return the number of processes that split a block.

    Raises:
        SettingsError: it was given for another mode, or does not divide the processes.
    """
    if mode != "fsdp+tp":
        if tp_size is not None:
            raise SettingsError(
                f"--tp-size is {tp_size}, and --parallel {mode} has none to choose; use --parallel fsdp+tp"
            )
        return count if mode == "tp" else 1
    size = TP_SIZE if tp_size is None else tp_size
    if size < 1 or count % size:
        raise SettingsError(f"--tp-size is {size}; it must divide the {count} processes")
    return size


def _number(name: str) -> int | None:
    """Return the value of a variable that `torchrun` sets."""
    text = environment.read_foreign(name)
    return int(text) if text is not None and text.isdecimal() else None
