"""A text that names no process group is refused where it is given, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import process_group_removed

import narrowcast as nc
from narrowcast.functional.collectives import checked_group

DELAYED = nc.recipe.DelayedScaling()
TAKERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a layer": (
        "tp_group",
        lambda group: nc.Linear(32, 32, parallel_mode="column", tp_size=2, tp_group=group),
    ),
    "a layer that splits": (
        "tp_group",
        lambda group: nc.LayerNormMLP(32, 64, set_parallel_mode=True, tp_group=group),
    ),
    "a layer made before": (
        "tp_group",
        lambda group: nc.Linear(32, 32, parallel_mode="column", tp_size=2).set_tensor_parallel_group(group),
    ),
    "groups": (
        "tp_group",
        lambda group: nc.GroupedLinear(2, 32, 32, parallel_mode="column", tp_size=2, tp_group=group),
    ),
    "a bias": (
        "tensor_parallel_group",
        lambda group: nc.ops.Bias(32, tensor_parallel=True, tensor_parallel_group=group),
    ),
    "set_recipe": ("amax_group", lambda group: nc.set_recipe(nc.Linear(32, 32), DELAYED, amax_group=group)),
    "autocast": (
        "amax_reduction_group",
        lambda group: nc.autocast(recipe=DELAYED, amax_reduction_group=group),
    ),
    "a reduction": ("group", lambda group: nc.reduce_delayed_scaling(nc.Linear(32, 32), group)),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_of_no_group(taker: str) -> None:
    label, take = TAKERS[taker]
    with pytest.raises(ValueError, match=f"^{label} is 'ranks', which names no process group"):
        take("ranks")
    with pytest.raises(TypeError, match=f"^{label} is an int; pass a torch.distributed process group"):
        take(7)
    with pytest.raises(
        ValueError, match=f"^{label} is -100: .*new_group returned it, .* this rank is not in the"
    ):
        take(dist.GroupMember.NON_GROUP_MEMBER)


def test_a_name_stands_for_its_group() -> None:
    with process_group_removed():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        world = dist.group.WORLD
        assert checked_group(world.group_name, "group") is checked_group(world, "group") is world
        assert checked_group(None, "group") is None
