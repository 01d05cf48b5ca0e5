"""A text that names no process group is refused where it is given, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import narrowcast as nc

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
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_of_no_group(taker: str) -> None:
    label, take = TAKERS[taker]
    with pytest.raises(ValueError, match=f"^{label} is 'ranks', which names no process group"):
        take("ranks")
    with pytest.raises(TypeError, match=f"^{label} is an int; pass a torch.distributed process group"):
        take(7)
