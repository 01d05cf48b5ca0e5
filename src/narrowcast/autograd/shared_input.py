"""``quantize_shared``: an input that frozen layers read one after the other is quantized once in eager code.

Projections of queries, keys and values get the same tensor, and so do gate and up. A graph shares equal calls by
itself. In eager code this file remembers the last input of a thread, weakly, and its buffers, until the input is freed,
written to, or another one comes. Layers with stored weights use it: no weight gradient saves their input, and no stage
of theirs is replayed.

Only results of recorded operations are shared. Other tensors, such as static outputs of a CUDA graph, may be written to
by kernels that raise no version. Nor is a call shared if others could see that it is missing, or if its buffers could
be read before they are written: under dispatch modes, profilers and ``torch.autocast``, on another stream, and while a
CUDA graph is captured, which must quantize what it reads.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import quantize_operand
from ..functional.routes import NOBODY, watcher
from ..quantizers import Operand
from ..upstream.cuda import current_stream
from ..upstream.tensors import base_of, version_of


class _Last(NamedTuple):
    """The last input with its version, the value of its quantizer, the stream, and the buffers."""

    inp: weakref.ref[Tensor]
    version: int
    value: str
    stream: int
    buffers: list[Tensor]


class Memory:
    """The last input of a thread. Backward threads may free it, too."""

    def __init__(self) -> None:
        self.last: _Last | None = None

    def forget(self, inp: weakref.ref[Tensor]) -> None:
        """Free the buffers of an input that is freed."""
        last = self.last
        if last is not None and last.inp is inp:
            self.last = None


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.memory = Memory()


_OF_THREAD = _OfThread()


def memory_of_thread() -> Memory:
    """Return what this thread remembers."""
    return _OF_THREAD.memory


def quantize_shared(inp: Tensor, flat: Tensor, operand: Operand) -> list[Tensor]:
    """Return ``quantize_operand`` of an input, or what the call before this one returned for the same.

    Args:
        inp: as the layer got it.
        flat: the same as a matrix.
        operand: neither delayed nor stochastic.
    """
    if not _can_share(inp):
        return quantize_operand(flat, operand.quantizer, None, None, None)  # type: ignore[no-any-return]
    inp = _whole(inp)
    stream = current_stream(inp.get_device()) if inp.is_cuda else 0
    memory = _OF_THREAD.memory
    last = memory.last
    known = (version_of(inp), operand.value, stream)
    if last is not None and last.inp() is inp and (last.version, last.value, last.stream) == known:
        return last.buffers
    buffers: Any = quantize_operand(flat, operand.quantizer, None, None, None)
    memory.last = _Last(weakref.ref(inp, memory.forget), *known, buffers)
    return buffers  # type: ignore[no-any-return]


def _whole(inp: Tensor) -> Tensor:
    """Return what an input is a view of, if it is all of it: a fused adapter passes its input on as a view."""
    base = base_of(inp)
    if base is None or type(base) is not Tensor or base.grad_fn is None or base.dtype != inp.dtype:
        return inp
    same = (base.shape, base.stride(), base.storage_offset()) == (
        inp.shape,
        inp.stride(),
        inp.storage_offset(),
    )
    return base if same else inp


def _can_share(inp: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(inp) is not Tensor or watcher() is not NOBODY:
        return False
    if inp.grad_fn is None or inp.is_meta:
        return False
    return not (inp.is_cuda and torch.cuda.is_current_stream_capturing())
