"""``set_deterministic``: whether a row's result may depend on the rows beside it.

The mode belongs to the process, like PyTorch's ``use_deterministic_algorithms``: a recomputation in a backward, which
another thread runs, reads the mode of its forward. Compiled code is guarded on it.
"""

from __future__ import annotations

from ._checks import is_one_of, shown

BATCH_INVARIANT = "batch-invariant"
MODES = (None, BATCH_INVARIANT)
PROCESSES = (1, 2, 4, 8)


class _Determinism:
    batch_invariant = 0


DETERMINISM = _Determinism()
"""The mode, which hot paths read without a call: 0, or over how many processes a layer may be split."""


def set_deterministic(mode: str | None, *, processes: int = 8) -> None:
    """Set how the results of this process may depend on the batch, until the next call.

    In the mode "batch-invariant" the output of a row has the same bits alone and in every batch, and under tensor
    parallelism over 1, 2, 4 or 8 processes. It covers the forward of linear layers, routers, norms and attention, and
    the loss :func:`narrowcast.linear_cross_entropy`. See the page on reinforcement learning.

    Args:
        mode: None, in which libraries choose the order of sums by the sizes, or "batch-invariant".
        processes: over how many processes, at most, a row-parallel layer has the bits of one: 1, 2, 4 or 8. A
            contraction is summed in as many parts. With 1 it is one sum, the fastest on a GPU.

    Raises:
        ValueError: another mode, or number of processes.
    """
    if not is_one_of(mode, MODES):
        raise ValueError(f"deterministic mode is {shown(mode)}; use None or 'batch-invariant'")
    if type(processes) is not int or processes not in PROCESSES:
        raise ValueError(f"processes is {shown(processes)}; use 1, 2, 4 or 8")
    DETERMINISM.batch_invariant = processes if mode == BATCH_INVARIANT else 0


def get_deterministic() -> str | None:
    """Return the mode that :func:`set_deterministic` has set."""
    return BATCH_INVARIANT if DETERMINISM.batch_invariant else None
