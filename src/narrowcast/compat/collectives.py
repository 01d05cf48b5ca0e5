"""Transformer Engine's collectives along the first dim, by its names: thin forms of ``torch.distributed``'s."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..functional.collectives import all_gather_single, check_scatters, group_size, reduce_scatter_single

Result = tuple[Tensor, Any]
"""(result, what to ``wait()`` for, None if it is there)."""


def is_nccl_ep_available() -> bool:
    """Return False: ``narrowcast.distributed.MoEDispatch`` needs no library besides torch.distributed."""
    return False


def get_distributed_world_size(group: Any = None) -> int:
    """Return how many processes a group has; 1 where torch.distributed is not initialized."""
    return group_size(group)


def get_distributed_rank(group: Any = None) -> int:
    """Return which of them this one is.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group")
    return dist.get_rank(group=group)


def gather_along_first_dim(
    inp: Tensor,
    process_group: Any,
    async_op: bool = False,
    quantizer: Any = None,
    output_tensor: Tensor | None = None,
) -> Result:
    """Return every process's tensor one below the other, in order of rank, without gradient.

    Args:
        inp: of the same shape on every process.
        process_group: the processes.
        async_op: return before it is there, with what to wait for.
        quantizer: None; layers gather quantized rows themselves (``sequence_parallel=True``).
        output_tensor: what to write to.
    Raises:
        NotImplementedError: a quantizer.
    """
    if quantizer is not None:
        raise NotImplementedError(
            "gather_along_first_dim(quantizer=...): layers gather quantized rows themselves, with "
            "sequence_parallel=True; here gather plain tensors"
        )
    size = group_size(process_group)
    if size == 1:
        return (inp if output_tensor is None else output_tensor.copy_(inp)), None
    out = inp.new_empty((size * inp.shape[0], *inp.shape[1:])) if output_tensor is None else output_tensor
    handle = all_gather_single(out, inp.contiguous(), group=process_group, async_op=async_op)
    return out, handle


def reduce_scatter_along_first_dim(
    inp: Tensor, tp_group: Any, async_op: bool = False, output: Tensor | None = None
) -> Result:
    """Return this process's share of the rows of the sum of every process's tensor, without gradient.

    Args:
        inp: of the same shape on every process.
        tp_group: the processes.
        async_op: as above.
        output: what to write to.
    Raises:
        ValueError: rows that do not divide among the processes.
    """
    size = group_size(tp_group)
    if size == 1:
        return (inp if output is None else output.copy_(inp)), None
    check_scatters(tuple(inp.shape), size)
    out = inp.new_empty((inp.shape[0] // size, *inp.shape[1:])) if output is None else output
    return out, reduce_scatter_single(out, inp.contiguous(), group=tp_group, async_op=async_op)


def allreduce(inp: Tensor, tp_group: Any = None, async_op: bool = False) -> Result:
    """Return the sum of every process's tensor, written to it, without gradient; arguments as above."""
    if group_size(tp_group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)


def set_tensor_model_parallel_attributes(tensor: Any, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a parameter as split over ranks, as the layers mark theirs.

    Raises:
        ValueError: it says so already.
    """
    if any(hasattr(tensor, name) for name in ("tensor_model_parallel", "partition_dim", "partition_stride")):
        raise ValueError(f"the parameter {tuple(tensor.shape)} has attributes of tensor parallelism already")
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
