"""``Together``: the processes that share a model, and write or read it in one call of all of them."""

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
        own: the rank of this process, in the default group.
        ranks: of all processes.
        first: whether this process has the first of them.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups
        self.own = dist.get_rank() if groups else 0
        if len(groups) == 1:
            self.ranks = sorted(dist.get_process_group_ranks(groups[0]))
        else:
            self.ranks = list(self.told(None))
        self.first = self.own == self.ranks[0]

    @classmethod
    def of(cls, group: Any) -> Together:
        """Return the processes of one group; None is the default one, or this process alone if there is none."""
        return cls([group] if dist.is_available() and dist.is_initialized() else [])

    def told(self, value: Any) -> dict[int, Any]:
        """Return the values of all processes by rank; every one calls it."""
        values = {self.own: value}
        for group in self._groups:  # tells what the groups before it have told
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, values, group=group)
            values = {rank: one for each in found for rank, one in each.items()}
        return dict(sorted(values.items()))

    @contextmanager
    def step(self) -> Iterator[dict[int, Any]]:
        """Run a block in every process; none goes on unless all can.

        What the block puts into the dict, under its own rank, is there for all ranks when the step ends.

        Raises:
            RuntimeError: another process has failed; the message names its rank and its error.
        """
        error: BaseException | None = None
        values: dict[int, Any] = {}
        try:
            yield values
        except BaseException as caught:  # PyTorch's CheckpointException is no Exception
            error = caught
        if self._groups:
            told = self.told((None if error is None else f"{type(error).__name__}: {error}", values))
            failed = {rank: why for rank, (why, _) in told.items() if why}
            if error is None and failed:
                rank, why = next(iter(failed.items()))
                raise RuntimeError(f"rank {rank} could not go on, so no rank does: {why}")
            values.clear()  # in the order of the ranks
            for _, others in told.values():
                values.update(others)
        if error is not None:
            raise error


ALONE = Together([])
