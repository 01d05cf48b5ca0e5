"""Delayed weight gradients: the backward queues their operands, and the user starts the GEMMs.

The queue lives outside any graph. An eager backward puts its operands in directly; a compiled one goes through
``narrowcast::defer_wgrad``, which finds the queue by its key when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import shown
from ._library import QUANTIZER, define
from .quantizer_value import QuantizerValue


class DeferredWgrad(NamedTuple):
    """The inputs of one weight gradient: column-wise operands, options of the GEMM, the bias gradient.

    ``groups``: empty, or for groups of rows the splits (G,), and (T, 0) of the dtype that the operands had.
    """

    grad: list[Tensor]
    grad_quantizer: QuantizerValue
    inp: list[Tensor]
    inp_quantizer: QuantizerValue
    grad_bias: Tensor | None
    overwrite: bool
    fast_accumulation: bool
    emulate: bool
    groups: Sequence[Tensor] = ()


_KEYS = itertools.count()
_STORES: weakref.WeakValueDictionary[str, WeightGradStore] = weakref.WeakValueDictionary()


class WeightGradStore:
    """First-in-first-out queue of the weight gradients of one parameter.

    ``key`` names it in a graph. ``ticket``: int64 (1,), counts what compiled backwards put in; a graph that changes
    nothing would be dropped by the compiler.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.key = f"wgrad{next(_KEYS)}"
        self.ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._queue: deque[DeferredWgrad] = deque()
        _STORES[self.key] = self

    def __len__(self) -> int:
        return len(self._queue)

    def __deepcopy__(self, memo: Any) -> WeightGradStore:
        """Return an empty store of its own: what waits belongs to the original's backwards."""
        return WeightGradStore(self.ticket.device)

    def __reduce__(self) -> Any:
        return WeightGradStore, (self.ticket.device,)

    def put(self, deferred: DeferredWgrad) -> None:
        """Queue one weight gradient."""
        self._queue.append(deferred)

    def pop(self) -> DeferredWgrad:
        """Take out the oldest one.

        Raises:
            RuntimeError: there is none.
        """
        if not self._queue:
            raise RuntimeError(
                "no weight gradient is waiting; call backward_dw() once after each backward of a module with "
                "delay_wgrad_compute=True"
            )
        return self._queue.popleft()

    def waiting(self) -> list[DeferredWgrad]:
        """Return the weight gradients that wait, oldest first."""
        return list(self._queue)

    def put_back(self, waiting: list[DeferredWgrad]) -> None:
        """Let these wait, and nothing else."""
        self._queue = deque(waiting)

    def assert_empty(self) -> None:
        """Check that nothing waits.

        Raises:
            RuntimeError: something does.
        """
        if self._queue:
            raise RuntimeError(
                f"{len(self._queue)} weight gradients still wait; call backward_dw() once per backward"
            )


def store_of(key: str) -> WeightGradStore:
    """Return the store of a key."""
    return _STORES[key]


def _defer_wgrad(store: str, *fields: Any) -> Tensor:
    if store not in _STORES:
        raise RuntimeError(
            f"the module of weight-gradient store {shown(store)} no longer exists; compile it again"
        )
    deferred = DeferredWgrad(*fields)
    # copies: the compiler reuses the memory of an operand after its last use in the graph
    copied = deferred._replace(
        grad=[buffer.clone() for buffer in deferred.grad],
        inp=[buffer.clone() for buffer in deferred.inp],
        grad_bias=None if deferred.grad_bias is None else deferred.grad_bias.clone(),
        groups=[tensor.clone() for tensor in deferred.groups],
    )
    _STORES[store].put(copied)
    return torch.ones(1, dtype=torch.int64, device=deferred.grad[0].device)


def _defer_wgrad_fake(store: str, grad: list[Tensor], *_: Any) -> Tensor:
    return grad[0].new_empty((1,), dtype=torch.int64)


_defer_op = define(
    f"defer_wgrad(str store, Tensor[] grad, {QUANTIZER} grad_quantizer, Tensor[] inp, {QUANTIZER} inp_quantizer, "
    "Tensor? grad_bias, bool overwrite, bool fast_accumulation, bool emulate, Tensor[] groups) -> Tensor",
    _defer_wgrad,
    _defer_wgrad_fake,
    # two equal calls are two entries: never merged, never recomputed
    tags=(torch.Tag.nondeterministic_seeded,),
)


def defer_wgrad(store: str, ticket: Tensor, deferred: DeferredWgrad) -> None:
    """Queue copies of the operands from a compiled backward.

    Args:
        store: key of the :class:`WeightGradStore`.
        ticket: its ticket, counted up.
        deferred: what to queue.
    Raises:
        RuntimeError: when it runs, the store is gone.
    """
    ticket.add_(_defer_op(store, *deferred))
