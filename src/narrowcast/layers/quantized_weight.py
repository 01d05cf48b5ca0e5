"""``quantize_weight``: a quantized weight for a GEMM, made, refreshed in place or taken as it is; scattering one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional.collectives import all_gather_single
from ..quantizers import Quantizer
from ..tensors import QuantizedTensor, QuantizedTensorStorage, storage_of


@torch.no_grad()
def quantize_weight(
    *,
    tensor: Tensor | None = None,
    quantizer: Quantizer | None = None,
    workspace: QuantizedTensorStorage | None = None,
    update_workspace: bool = True,
    skip_update_flag: Tensor | None = None,
    fsdp_group: Any = None,
    workspace_dtype: torch.dtype | None = None,
    cache: bool = False,
) -> tuple[Any, Any]:
    """Return the weight for the GEMM and what to keep for later microbatches or None, for loops that keep weights
    themselves.

    A quantized ``tensor`` is returned as it is, with the quantizer's directions: one that was missing
    is made once and kept on it; none is dropped. A ``workspace`` that has these directions is refreshed in place, so
    that a CUDA graph which reads it stays right. Else the tensor is quantized. All but a refresh traces. The layers do
    not call this: what they keep is made again when it is refreshed, since backwards may still read what was there.

    Args:
        tensor: (N, K), fp32, bf16, fp16 or quantized; not needed where a workspace is not refreshed.
        quantizer: how to quantize it; for a refresh default is the workspace's own.
        workspace: what an earlier call gave to keep.
        update_workspace: refresh it.
        skip_update_flag: fp32 of one element on the device; a refresh is always issued, and skipped there where the
            flag is not 0.
        fsdp_group: process group over which :func:`scatter_workspace` has scattered the workspace, which then is
            gathered first, by all ranks.
        workspace_dtype: nominal dtype of what is made; default: the tensor's.
        cache: the result is kept: it is a tensor, also where the quantizer makes bare storages.
    Raises:
        ValueError: a refresh without a tensor; nothing to take, and no tensor or no quantizer.
        RuntimeError: a quantized tensor of a format that cannot make a missing direction.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        if quantizer is not None:
            tensor.update_usage(quantizer.rowwise_usage or None, quantizer.columnwise_usage or None)
        return tensor, None
    if workspace is not None and (quantizer is None or _serves(workspace, quantizer)):
        if fsdp_group is not None:
            _gather(workspace, fsdp_group)
        if update_workspace or skip_update_flag is not None:
            if tensor is None:
                raise ValueError("a workspace is to be refreshed, and tensor is None; pass the weight")
            own: Any = workspace._quantizer  # type: ignore[attr-defined]
            (quantizer or own).update_quantized(tensor, workspace, noop_flag=skip_update_flag)
        return workspace, None
    if tensor is None or quantizer is None:
        missing = "tensor" if tensor is None else "quantizer"
        raise ValueError(
            f"there is no workspace that serves, and {missing} is None; pass tensor and quantizer"
        )
    kept = quantizer.replace(internal=False) if cache else quantizer
    quantized = kept.quantize(tensor, dtype=workspace_dtype)
    return quantized, quantized if cache else None


@torch.no_grad()
def scatter_workspace(workspace: QuantizedTensorStorage, fsdp_group: Any) -> None:
    """Leave each rank its part of a workspace's buffers, until :func:`quantize_weight` with this group gathers them.

    A buffer whose elements do not divide among the ranks stays whole. Until then only its shape may be read.

    Args:
        workspace: as :func:`quantize_weight` gave it to keep, the same on all ranks.
        fsdp_group: process group.
    """
    ranks, rank = torch.distributed.get_world_size(fsdp_group), torch.distributed.get_rank(fsdp_group)
    if not isinstance(workspace, Tensor):  # a bare storage reads its shape off the buffers
        workspace._shape = tuple(workspace.size())
    for attribute, _ in workspace._FLATTEN_TENSOR_BUFFERS:
        buffer = getattr(workspace, attribute)
        if buffer is not None and buffer.numel() and buffer.numel() % ranks == 0:
            setattr(workspace, attribute, buffer.reshape(-1).chunk(ranks)[rank].clone())


def _gather(workspace: QuantizedTensorStorage, fsdp_group: Any) -> None:
    quantizer: Any = workspace._quantizer
    own = quantizer.with_usage(**workspace.get_usages())
    for attribute, (shape, _) in own._describe_buffers(tuple(workspace.size()), workspace.dtype).items():
        part = getattr(workspace, attribute)
        if part.shape != tuple(shape):
            whole = part.new_empty(shape)
            all_gather_single(whole.view(-1), part, group=fsdp_group)
            setattr(workspace, attribute, whole)


def _serves(workspace: QuantizedTensorStorage, quantizer: Quantizer) -> bool:
    """Return whether it has the quantizer's format and directions."""
    own: Any = workspace._quantizer  # type: ignore[attr-defined]
    # a method of a tensor would not trace
    usages = (storage_of(workspace) if isinstance(workspace, QuantizedTensor) else workspace).get_usages()
    return (
        own._storage_name == quantizer._storage_name
        and own._layout() == quantizer._layout()
        and (usages["rowwise"] or not quantizer.rowwise_usage)
        and (usages["columnwise"] or not quantizer.columnwise_usage)
    )
