"""``DistributedDataParallel`` leaves the state of delayed scaling to each rank, and gives ranks the same codes.

By default it broadcasts the buffers of rank 0 before each forward. That would replace what the other ranks have
collected, before their scales are renewed from it. Its constructor does broadcast the state, with the weights.

Of weights that are stored quantized the constructor would broadcast the values and have every rank encode them, rank 0
included. Formats that encode rows and columns apart, or scale by the amax, then have other codes than before. So the
codes and scales travel, as bytes.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..tensors import DequantizingTensor, QuantizedTensor
from ..upstream.ddp import check_synchronization, synchronize_first

PENDING: list[weakref.ref[DistributedDataParallel]] = []
"""Replicas made since a layer last ran."""


def _note_replica(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if torch.compiler.is_compiling():  # Dynamo registers modules that it cannot trace, and builds no replica
        return
    if name == "module" and isinstance(parent, DistributedDataParallel):
        if module is not None and parent.process_group.size() > 1:  # type: ignore[union-attr]
            check_gradients_are_reduced(module, "DistributedDataParallel")
        PENDING.append(weakref.ref(parent))
        if module is not None and _has_stored_weights(module):
            check_synchronization()


register_module_module_registration_hook(_note_replica)


def check_gradients_are_reduced(model: nn.Module, by: str) -> None:
    """
    Raises:
        ValueError: a layer's weight gradients bypass what reduces gradients over ranks.
    """
    for name, layer in model.named_modules():
        for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            if getattr(layer, option, False):
                raise ValueError(
                    f"{name or type(layer).__name__} has {option}=True, which goes past {by}'s reduction of gradients; "
                    "make it without"
                )


def leave_state_to_ranks() -> None:
    """Take the state of delayed layers out of what replicas broadcast from their next forward on."""
    while PENDING:
        replica = PENDING.pop()()
        if replica is not None:
            names = {
                f"{path}.{name}" if path else name
                for path, module in replica.module.named_modules()
                if hasattr(module, "_state_names")
                for name in module._state_names()
            }
            replica.parameters_to_ignore = names.union(replica.parameters_to_ignore)
            kept = {
                name: buffer for name, buffer in replica.named_module_buffers.items() if name not in names
            }
            replica.named_module_buffers, replica.modules_buffers = kept, list(kept.values())


def _has_stored_weights(module: nn.Module) -> bool:
    return any(isinstance(parameter, DequantizingTensor) for parameter in module.parameters())


@torch.no_grad()
def _broadcast_codes(module: nn.Module, group: Any, src: int, ignored: Container[str]) -> set[str]:
    """Give every rank the codes and scales of one, and its unrounded initial values: the names of these parameters.

    Raises:
        RuntimeError: ranks store the weights differently; on all of them.
    """
    stored: dict[str, Any] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DequantizingTensor) and name not in ignored
    }
    buffers: list[Tensor] = []

    def note(buffer: Tensor) -> Tensor:
        buffers.append(buffer)
        return buffer

    device = next((parameter.device for parameter in stored.values()), torch.device("cpu"))
    for parameter in stored.values():
        turns = isinstance(parameter, QuantizedTensor) and parameter._turns()
        (parameter._rows_alone() if turns else parameter)._like(note)
        initial = parameter.get_high_precision_init_val()
        buffers += [] if initial is None else [initial]
    _check_stored_alike([*stored], buffers, group, device)
    for buffer in buffers:
        if buffer.numel():
            sent = buffer.to(device, copy=True, memory_format=torch.contiguous_format)
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=src)
            buffer.copy_(sent)
    for parameter in stored.values():
        turns = isinstance(parameter, QuantizedTensor) and parameter._turns()
        if turns and parameter.get_usages()["columnwise"]:  # made again from the received rows
            parameter.update_usage(columnwise_usage=False)
            parameter.update_usage(columnwise_usage=True)
    return set(stored)


def _check_stored_alike(names: list[str], buffers: list[Tensor], group: Any, device: torch.device) -> None:
    described = zlib.crc32(repr((names, [(tuple(one.shape), one.dtype) for one in buffers])).encode())
    extent = torch.tensor([described, -described], dtype=torch.float64, device=device)
    dist.all_reduce(extent, op=dist.ReduceOp.MAX, group=group)
    most, fewest = extent.tolist()
    if most != -fewest:
        raise RuntimeError(
            f"the ranks store these weights in different formats or directions: {', '.join(names)}; build the model of "
            "every rank with the same quantized_model_init"
        )


synchronize_first(_has_stored_weights, _broadcast_codes)
