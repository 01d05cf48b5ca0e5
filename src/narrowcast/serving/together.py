"""``Together``: the processes that share a model, and write it in one call of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Together:
    """The processes of several groups, which go on together or not at all.

    Every one of them makes the same steps. A step that fails in one process ends the call in all.

    Args:
        groups: the process groups that this process is in; none for a process alone. Groups that cross, as those of a
            mesh's dims, are one set of processes.

    Attributes:
        ranks: of all processes, in the default group.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups
        own = dist.get_rank() if groups else 0
        self.ranks = sorted(self._gathered({own: None}))
        self.first = own == self.ranks[0]
        self._own = own

    def _gathered(self, values: dict[int, Any]) -> dict[int, Any]:
        """Return the values of all processes by rank: a group tells what the groups before it have told."""
        for group in self._groups:
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, values, group=group)
            values = {rank: value for one in told for rank, value in one.items()}
        return values

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a block in every process; none goes on unless all can.

        Raises:
            RuntimeError: another process has failed; the message names its rank and its error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self._groups:
            text = None if error is None else f"{type(error).__name__}: {error}"
            failed = {rank: told for rank, told in self._gathered({self._own: text}).items() if told}
            if error is None and failed:
                rank, told = min(failed.items())
                raise RuntimeError(f"rank {rank} could not go on, so no rank does: {told}")
        if error is not None:
            raise error


ALONE = Together([])
