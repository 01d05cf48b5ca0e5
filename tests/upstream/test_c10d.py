"""What narrowcast uses of c10d that is not public: there, and what happens where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from loss import is_stated, outcomes

from narrowcast.upstream import c10d
from narrowcast.upstream.private import ENTRIES, Absent

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

SCENARIOS = f"{Path(__file__).with_name('distributed_scenarios.py')}"
COLLECTIVES = [
    f"torch.ops._c10d_functional.{name}.default"
    for name in (
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
        "all_to_all_single",
        "wait_tensor",
    )
]
GROUPS = [
    f"torch.distributed.distributed_c10d.{name}" for name in ("_get_group_size_by_name", "_get_default_group")
]


@pytest.mark.parametrize(
    "name", ["all_gather_op", "reduce_scatter_op", "all_reduce_op", "all_to_all_op", "wait_op"]
)
def test_collectives_are_there(name: str) -> None:
    assert not isinstance(getattr(c10d, name), Absent)


@pytest.mark.parametrize("name", ["size_of_group_named", "group_named", "default_group"])
def test_groups_are_found_by_name(name: str) -> None:
    assert not isinstance(getattr(c10d, name), Absent)
    assert getattr(c10d, name) is not c10d._world


def test_collectives_start_together() -> None:
    assert c10d._coalescing is not None


def test_every_entry_is_tried() -> None:
    mine = {name for name in ENTRIES if "c10d" in name or "_coalescing" in name}
    tried = {*COLLECTIVES, *GROUPS, "torch.distributed._coalescing_manager"}
    assert mine == tried | {"torch.distributed.distributed_c10d._resolve_process_group"}


def test_without_a_collective_or_a_name() -> None:
    names = [*COLLECTIVES, *GROUPS]
    found = outcomes(names, f"{SCENARIOS}:collectives")
    assert [name for name in names if not is_stated(name, found)] == []


def test_without_the_coalescing_manager() -> None:
    names = ["torch.distributed._coalescing_manager", "torch._chunk_cat"]
    found = outcomes(names, f"{SCENARIOS}:gathers")
    assert [found[name] for name in names] == [found[""]] * 2
    assert found[""].startswith("bits"), found[""]
