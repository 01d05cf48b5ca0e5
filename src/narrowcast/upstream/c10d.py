"""c10d: process groups by their names, collectives that trace, and several collectives sent as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .private import private

_COLLECTIVES = "torch/distributed/_functional_collectives.py"
_GROUPS = "torch/distributed/distributed_c10d.py"


def _collective(name: str) -> Any:
    return private(
        f"torch.ops._c10d_functional.{name}.default",
        follows=_COLLECTIVES,
        without="layers split over processes need it; train without tensor parallelism or on a tested release",
    )


all_gather_op = _collective("all_gather_into_tensor")
"""``(input, group size, group name)``: every process's tensor along dim 0; read it after :data:`wait_op`."""

reduce_scatter_op = _collective("reduce_scatter_tensor")
"""``(input, "sum", group size, group name)``: this process's rows of the reduced tensor."""

all_reduce_op = _collective("all_reduce")
"""``(input, "sum" | "max" | "min", group name)``: the reduced tensor."""

all_to_all_op = _collective("all_to_all_single")
"""``(input, rows received, rows sent, group name)``: rows for each process against rows from each process."""

wait_op = _collective("wait_tensor")
"""Wait for a started collective."""

size_of_group_named: Any = private(
    "torch.distributed.distributed_c10d._get_group_size_by_name",
    without="a group is carried by its name; train without tensor parallelism or on a tested release",
)
"""Return how many processes the group of a name has. The compiler knows this function as a constant."""

group_named: Any = private(
    "torch.distributed.distributed_c10d._resolve_process_group",
    without="pass the process group itself, not its name",
)
"""Return the process group of a name."""


def _world() -> Any:
    """Return the default group by ``torch.distributed.group.WORLD``, which a trace cannot always read."""
    return dist.group.WORLD


default_group: Any = private(
    "torch.distributed.distributed_c10d._get_default_group",
    without="group.WORLD is read, which is the same group",
    fallback=_world,
)
"""Return the default process group, in traced code as well."""


_coalescing: Any = private(
    "torch.distributed._coalescing_manager",
    follows=_GROUPS,
    without="collectives start one by one, with the same result",
    fallback=None,
)


def run_together(starts: list[Callable[[], Any]], group: Any, async_op: bool) -> Any:
    """Start collectives, as one where the backend can; return what to wait for, or None if the stream waits.

    Args:
        starts: functions that start one collective each and return its work.
        group: the process group of all of them.
        async_op: what ``starts`` were made with.
    """
    if _coalescing is None:
        for start in starts:
            work = start()
            if work is not None:
                work.wait()
        return None
    with _coalescing(group=group, async_ops=async_op) as together:
        for start in starts:
            start()
    return together.works[0] if async_op else None
