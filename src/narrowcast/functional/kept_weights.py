"""Quantized weights kept for several microbatches: a note of what they were made from, to find out when they are old.

A weight has changed when it has another storage, another place in its storage, or another version: optimizer steps,
in-place edits, ``set_`` and assignments to ``.data`` are all noticed. Writes through ``weight.data`` itself, or through
the vector that ``vector_to_parameters`` takes apart, raise no version, and PyTorch leaves no other trace of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._library import define

# Storage of a kept buffer -> (itself, what its weights were). The references keep addresses from being given out again.
_MADE_FROM: dict[int, tuple[StorageWeakRef, list[tuple[StorageWeakRef, int, int]]]] = {}
_MANY = 1024


def note_kept(buffer: Tensor, weights: list[Tensor]) -> None:
    """Note which weights, in which versions, a buffer was made from; inference tensors have none and are not noted."""
    if len(_MADE_FROM) >= _MANY:
        for key, (kept, _) in list(_MADE_FROM.items()):
            if kept.expired():
                _MADE_FROM.pop(key, None)
    if not any(weight.is_inference() for weight in weights):
        of_weights = [
            (StorageWeakRef(weight.untyped_storage()), weight.data_ptr(), weight._version)
            for weight in weights
        ]
        kept = StorageWeakRef(buffer.untyped_storage())
        _MADE_FROM[kept.cdata] = kept, of_weights


def is_current(buffer: Tensor, weights: list[Tensor]) -> bool:
    """Whether a buffer was made from these weights in their present versions, and may be used here.

    A buffer that was made in inference mode may only be used in inference mode.
    """
    noted = _MADE_FROM.get(buffer.untyped_storage()._cdata)
    if noted is None or not _usable(buffer):
        return False
    return len(noted[1]) == len(weights) and all(
        not weight.is_inference()
        and storage.cdata == weight.untyped_storage()._cdata
        and (address, version) == (weight.data_ptr(), weight._version)
        for (storage, address, version), weight in zip(noted[1], weights)
    )


def _usable(buffer: Tensor) -> bool:
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _kept_weight(weights: list[Tensor], buffer: Tensor, first: bool) -> Tensor:
    # the replay of a CUDA graph runs no Python, so nothing was noted of what it made
    unknown = buffer.untyped_storage()._cdata not in _MADE_FROM and _usable(buffer)
    if not (first or unknown or is_current(buffer, weights)):
        raise RuntimeError(
            "a weight was changed since is_first_microbatch=True quantized it, or that was under inference mode; pass "
            "True for the first microbatch after each change (compiled code cannot tell to quantize it again)"
        )
    out = buffer.clone()
    if first:
        note_kept(out, weights)
    return out


kept_weight = define(
    "kept_weight(Tensor[] weights, Tensor buffer, bool first) -> Tensor",
    _kept_weight,
    lambda weights, buffer, first: torch.empty_like(buffer),
    # never merged with another call nor repeated: it reads more than the inputs of the graph
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""A copy of one buffer of a quantized weight, for compiled code: a graph can be guarded on no version of a tensor.

Args:
    weights: what it was made from. buffer: the smallest of the operand, since it is copied.
    first: it was made just now, which is noted; else it was kept.
Raises:
    RuntimeError: when it runs, the weights are no longer those that the buffer was made from.
"""
