"""Quantized weights kept for several microbatches: a note of what they were made from, to find out when they are old.

A weight has changed when it has another storage, place, shape, stride or version, when an optimizer has stepped, or, on
a CPU, when its bytes are others. Optimizers count by their steps, for fused ones write without raising a version. Any
optimizer's step counts for every weight: those that keep master weights copy them to parameters that they do not own.

On a GPU some writes leave no trace: through ``weight.data``, through its storage, by a kernel or collective that is
given either, and by the replay of a CUDA graph. Finding them would take a pass over the weight, half of what quantizing
it takes. ``torch.autograd.graph.increment_version(weight)`` tells of such a write.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._tracing import PLAIN
from ..upstream.tensors import version_of
from ._library import define


class _Steps:
    """The number of optimizer steps seen."""

    stepped = False
    """Whether one has since ``seen``. A compiled step writes this and reads nothing, so no graph is guarded on it."""
    seen = 0

    def count(self) -> int:
        if self.stepped:
            self.stepped = False
            self.seen += 1
        return self.seen


_STEPS = _Steps()


def _note_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _STEPS.stepped = True


register_optimizer_step_post_hook(_note_step)


class WeightsNote(NamedTuple):
    """The state of some weights at :func:`note_weights`."""

    storages: list[StorageWeakRef]
    """They keep the addresses of storages from being given out again."""
    states: list[tuple[Any, ...]]
    steps: int | None
    """None if an optimizer writes what is kept."""


def note_weights(weights: list[Tensor]) -> WeightsNote | None:
    """Note which weights these are and what is in them; None of inference tensors, which have no versions."""
    if any(weight.is_inference() for weight in weights):
        return None
    storages = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
    return WeightsNote(storages, [_state(weight) for weight in weights], _STEPS.count())


def are_unchanged(weights: list[Tensor], note: WeightsNote | None) -> bool:
    """Return whether these are the weights of a note, as they were then."""
    return (
        note is not None
        and note.steps in (None, _STEPS.count())
        and len(note.states) == len(weights)
        and all(
            not weight.is_inference()
            and storage == StorageWeakRef(weight.untyped_storage())
            and state == _state(weight)
            for storage, state, weight in zip(note.storages, note.states, weights)
        )
    )


def _state(weight: Tensor) -> tuple[Any, ...]:
    layout = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
    return *layout, version_of(weight), _checksum(weight)


def _checksum(weight: Tensor) -> int | None:
    """Return the checksum of a CPU tensor's bytes, if ``numpy()`` exposes them; else None."""
    if type(weight) not in PLAIN or weight.device.type != "cpu" or not weight.numel():
        return None
    dense = weight.detach().contiguous()
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


# Storage of a kept buffer -> what its weights were. The references keep addresses from being given out again.
_MADE_FROM: dict[StorageWeakRef, WeightsNote] = {}
_MANY = 1024


def note_kept(buffer: Tensor, weights: list[Tensor]) -> None:
    """Note which weights, in which versions, a buffer was made from; inference tensors have none and are not noted."""
    if len(_MADE_FROM) >= _MANY:
        for kept in list(_MADE_FROM):
            if kept.expired():
                _MADE_FROM.pop(kept, None)
    note = note_weights(weights)
    if note is not None:
        _MADE_FROM[StorageWeakRef(buffer.untyped_storage())] = note


def note_written(buffer: Tensor, weights: list[Tensor]) -> None:
    """Note which weights an optimizer has made a buffer from, in the step that is not counted yet."""
    note_kept(buffer, weights)
    made_from = StorageWeakRef(buffer.untyped_storage())
    if made_from in _MADE_FROM:
        _MADE_FROM[made_from] = _MADE_FROM[made_from]._replace(steps=None)


def is_current(buffer: Tensor, weights: list[Tensor]) -> bool:
    """Return whether a buffer was made from these weights as they are now, and may be used here.

    A buffer that was made in inference mode may only be used in inference mode.
    """
    note = _MADE_FROM.get(StorageWeakRef(buffer.untyped_storage()))
    return _usable(buffer) and are_unchanged(weights, note)


def _usable(buffer: Tensor) -> bool:
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _kept_weight(weights: list[Tensor], buffer: Tensor, first: bool) -> Tensor:
    # the replay of a CUDA graph runs no Python, so nothing was noted of what it made
    unknown = StorageWeakRef(buffer.untyped_storage()) not in _MADE_FROM and _usable(buffer)
    if not (first or unknown or is_current(buffer, weights)):
        raise RuntimeError(
            "a weight was changed, or an optimizer has stepped, since is_first_microbatch=True quantized it, or that "
            "was under inference mode; pass True for the first microbatch after each change (compiled code cannot tell "
            "to quantize it again), or call write_weight_codes() of an optimizer that writes its codes"
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


def use_kept(buffer: Tensor, weights: list[Tensor], first: bool = False) -> Tensor | None:
    """Return the buffer of a quantized weight for this microbatch, or None if the weights have changed since.

    Args:
        buffer: the smallest of the operand. weights: what it was made from.
        first: it was made just now, which is noted; else it was kept.
    Raises:
        RuntimeError: when compiled code runs, the weights have changed, since a graph cannot quantize them again.
    """
    if torch.compiler.is_compiling():
        return kept_weight(weights, buffer, first)  # type: ignore[no-any-return]
    if first:
        note_kept(buffer, weights)
        return buffer
    return buffer if is_current(buffer, weights) else None
