"""Collectives of layers that are split over processes; they trace, and never change their input.

A group is carried by its name: a process group neither copies nor pickles, and must not be part of a compiled graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import a_kind, shown
from .._environment import read_foreign
from .._tracing import can_check
from ..upstream.c10d import (
    all_gather_op,
    all_reduce_op,
    all_to_all_op,
    default_group,
    group_named,
    reduce_scatter_op,
    size_of_group_named,
    wait_op,
)

# PyTorch 2.13 has other names for them, and warns at the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)


def group_name(process_group: Any, label: str = "process_group") -> str | None:
    """Return the name of a process group; None for the default group.

    Args:
        process_group: a group, its name, or None.
        label: the argument's name, for messages.
    Raises:
        TypeError: no process group.
        ValueError: the name of none, or a group without this rank.
        RuntimeError: it is not registered under a name.
    """
    # before torch 2.13 a trace cannot ask a group what it has
    if can_check():
        checked_group(process_group, label)
    if process_group is None or isinstance(process_group, str):
        return process_group
    name = process_group.group_name
    if not name:
        raise RuntimeError(
            "the process group has no registered name; make it with torch.distributed.new_group"
        )
    return name


def checked_group(process_group: Any, label: str) -> Any:
    """Return a process group that was given by itself or by its name; None for the default group.

    Raises:
        TypeError, ValueError: as of :func:`group_name`.
    """
    if isinstance(process_group, str):
        try:
            return group_named(process_group)
        except (RuntimeError, ValueError, KeyError):
            raise ValueError(
                f"{label} is {shown(process_group)}, which names no process group here; call "
                "torch.distributed.init_process_group first and pass a group, or None"
            ) from None
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{label} is {shown(process_group)}: torch.distributed.new_group returned it, for this rank is not in the "
            "group; make this call on the group's own ranks alone"
        )
    if process_group is not None and not hasattr(process_group, "group_name"):
        raise TypeError(
            f"{label} is {a_kind(process_group)}; pass a torch.distributed process group, or None"
        )
    return process_group


def group_size(group: Any) -> int:
    """Return how many processes a group has, given by itself, by name, or None for the default one.

    It is 1 where torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return size_of_group_named(group) if isinstance(group, str) else dist.get_world_size(group)


def gather_rows(x: Tensor, group: str | None) -> Tensor:
    """Return the concatenation of every process's ``x`` along the first dim, in order of rank; a view of ``x`` for one
    process.
    """
    return x.view_as(x) if group_size(group) == 1 else arrived(start_gather(x, group))


def scatter_rows(x: Tensor, group: str | None) -> Tensor:
    """Return this process's share of the rows of the sum of every process's ``x``; a view of ``x`` for one process.

    Raises:
        ValueError: the first dim is not a multiple of the number of processes.
    """
    return x.view_as(x) if group_size(group) == 1 else arrived(start_scatter(x, group))


def parts_of_sum(x: Tensor, group: str | None, scattered: bool) -> tuple[Tensor, ...]:
    """Return every process's ``x`` in order of rank, to be summed; ``scattered``: of each this process's row shard.

    Raises:
        ValueError: ``scattered``, and the first dim is not a multiple of the number of processes.
    """
    size = group_size(group)
    if not scattered:
        return gather_rows(x, group).chunk(size)
    check_scatters(x.shape, size)
    rows = [x.shape[0] // size] * size
    return arrived(all_to_all_op(sendable(x), rows, rows, registered_name(group))).chunk(size)


def sum_over(x: Tensor, group: str | None) -> Tensor:
    """Return the sum of every process's ``x``; a view of ``x`` for one process."""
    return x.view_as(x) if group_size(group) == 1 else arrived(start_sum(x, group))


def largest_of(x: Tensor, group: str | None) -> Tensor:
    """Return the largest of every process's ``x``, element by element."""
    return arrived(_reduce(x, "max", registered_name(group)))


def smallest_of(x: Tensor, group: str | None) -> Tensor:
    """Return the smallest of every process's ``x``, element by element."""
    return arrived(_reduce(x, "min", registered_name(group)))


# -- begun, and waited for where the result is read: what stands between the two runs meanwhile ------------------------


def start_gather(x: Tensor, group: str | None) -> Tensor:
    """:func:`gather_rows` of several processes, not to be read before :func:`arrived`."""
    return all_gather_op(sendable(x), group_size(group), registered_name(group))


def start_scatter(x: Tensor, group: str | None) -> Tensor:
    """:func:`scatter_rows` of several processes, not to be read before :func:`arrived`.

    Raises:
        ValueError: the first dim is not a multiple of the number of processes.
    """
    size = group_size(group)
    check_scatters(x.shape, size)
    return reduce_scatter_op(sendable(x), "sum", size, registered_name(group))


def start_sum(x: Tensor, group: str | None) -> Tensor:
    """:func:`sum_over` of several processes, not to be read before :func:`arrived`."""
    return _reduce(x, "sum", registered_name(group))


def sendable(x: Tensor) -> Tensor:
    """Return contiguous ``x``, as a collective takes it.

    Raises:
        RuntimeError: a CUDA graph is being captured, and ``x`` lies in expandable segments: NCCL registers what it
            sends as one allocation, which it is not, and replays send other memory (pytorch/pytorch#158029). Compiled
            code is not checked.
    """
    if can_check() and x.is_cuda and torch.cuda.is_current_stream_capturing() and _is_misregistered(x):
        raise RuntimeError(
            "a CUDA graph captures a collective of memory in expandable segments; its replays would send wrong values "
            "(pytorch/pytorch#158029): set NCCL_GRAPH_REGISTER=0 before the process group is made, or take "
            "expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
        )
    return x.contiguous()


def _is_misregistered(x: Tensor) -> bool:
    if read_foreign("NCCL_GRAPH_REGISTER") == "0":
        return False
    return any(
        segment["is_expandable"] and 0 <= x.data_ptr() - segment["address"] < segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def arrived(tensor: Tensor) -> Tensor:
    """Wait for a started collective."""
    return wait_op(tensor)


def check_scatters(shape: tuple[int, ...], size: int) -> None:
    """Check that the rows divide among ``size`` processes.

    Raises:
        ValueError: they do not.
    """
    if shape[0] % size:
        raise ValueError(
            f"the first dim of shape {tuple(shape)} does not divide among {size} processes; pad it to a multiple"
        )


def registered_name(group: str | None) -> str:
    """Return the name of a group, that of the default group for None."""
    return default_group().group_name if group is None else group


def _reduce(x: Tensor, how: str, name: str) -> Tensor:
    return all_reduce_op(sendable(x), how, name)
