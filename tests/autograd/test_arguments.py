"""The records that cross the autograd boundary: slots, documented, and without a way to the module."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import arguments

RECORDS = [
    arguments.DelayedScales,
    arguments.LinearWgrad,
    arguments.LinearFwdArgs,
    arguments.LinearBwdArgs,
]
LEAVES = (Tensor, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, enum.Enum)


@pytest.mark.parametrize("record", RECORDS)
def test_a_misspelled_attribute_fails(record: type) -> None:
    made = object.__new__(record)
    with pytest.raises(AttributeError):
        made.misspelled = 1
    assert "__dict__" not in dir(made)


@pytest.mark.parametrize("record", [arguments.LinearWgrad, arguments.LinearFwdArgs])
def test_every_field_is_documented(record: Any) -> None:
    fields = [field.name for field in dataclasses.fields(record)]
    assert [name for name in fields if f"``{name}``" not in (record.__doc__ or "")] == []


def reachable(value: Any, seen: dict[int, Any]) -> None:
    """All objects that a value holds, by identity."""
    if id(value) in seen or value is None or isinstance(value, (str, int, float, *LEAVES)):
        return
    seen[id(value)] = value
    if isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    else:
        names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        parts = [getattr(value, name, None) for name in names if not name.startswith("__")]
        parts += vars(value).values() if hasattr(value, "__dict__") else []
    for part in parts:
        reachable(part, seen)


def node_of(out: Tensor) -> Any:
    """The node of the library's function behind an output."""
    waiting: list[Any] = [out.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if hasattr(node, "backward_objects"):
            return node
        waiting += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError("no node of this library")


@pytest.mark.parametrize(
    "recipe",
    [nc.recipe.Float8CurrentScaling(), nc.recipe.DelayedScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize("delayed_wgrad", [False, True])
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_no_module_is_reachable(kind: str, delayed_wgrad: bool, recipe: nc.recipe.Recipe) -> None:
    options: dict[str, Any] = {"recipe": recipe, "delay_wgrad_compute": delayed_wgrad, "device": "cpu"}
    x = torch.randn(6, 16, requires_grad=True)
    if kind == "grouped_linear":
        out = nc.GroupedLinear(2, 16, 16, **options)(x, [2, 4])
    else:
        kinds: dict[str, Any] = {
            "linear": nc.Linear,
            "layernorm_linear": nc.LayerNormLinear,
            "layernorm_mlp": nc.LayerNormMLP,
        }
        out = kinds[kind](16, 16, **options)(x)
    seen: dict[int, Any] = {}
    reachable(node_of(out).backward_objects, seen)
    assert seen
    assert [value for value in seen.values() if isinstance(value, nn.Module)] == []


def test_the_old_way_to_a_kept_weight_is_gone() -> None:
    with pytest.raises(AttributeError):
        nc.Linear(4, 4, device="cpu").get_weight_workspace  # noqa: B018
