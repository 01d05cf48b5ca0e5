"""The records that cross the autograd boundary: slots, documented, and without a way to the module."""

from __future__ import annotations

import enum
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import arguments
from narrowcast.recipe import linear_plan

RECORDS = [
    arguments.DelayedScales,
    arguments.LinearWgrad,
    arguments.LinearFwdArgs,
    arguments.LinearBwdArgs,
]
LEAVES = (Tensor, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, enum.Enum)


@pytest.mark.parametrize("record", RECORDS)
def test_a_misspelled_attribute_fails(record: type) -> None:
    made = tuple.__new__(record) if issubclass(record, tuple) else object.__new__(record)
    with pytest.raises(AttributeError):
        made.misspelled = 1
    assert "__dict__" not in dir(made)


@pytest.mark.parametrize("record", [arguments.LinearWgrad, arguments.LinearFwdArgs])
def test_every_field_is_documented(record: Any) -> None:
    assert [name for name in record._fields if f"``{name}``" not in (record.__doc__ or "")] == []


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


def made_plan(recipe: nc.recipe.Recipe) -> Any:
    return linear_plan(recipe, "", True, True, module_type="linear")


def test_what_a_forward_follows_from() -> None:
    plan = made_plan(nc.recipe.Float8CurrentScaling())
    scales = arguments.DelayedScales()
    kept = plan.kept_weight.quantize(torch.randn(48, 32))
    assert kept.rowwise[1] is kept.columnwise[1], "one scale for both"

    def of(workspace: Any) -> Any:
        wgrad = arguments.LinearWgrad()
        return arguments.LinearFwdArgs(plan, torch.bfloat16, scales, workspace, wgrad, True).depends()

    assert of(None) == ((plan, torch.bfloat16, None), [None, None])
    values, tensors = of(kept)
    assert values == (plan, torch.bfloat16, None, 2, False, True)
    assert list(map(id, tensors)) == list(map(id, [None, None, *kept.rowwise, kept.columnwise[0]]))
    assert of(kept._replace(quantizer=made_plan(nc.recipe.MXFP8BlockScaling()).kept_weight.quantizer)) is None


def test_what_a_backward_follows_from() -> None:
    plan, foreign = made_plan(nc.recipe.Float8CurrentScaling()), nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
    quantizers = {"high": None, "own": plan.weight.quantizer, "kept": plan.kept_weight.quantizer}

    def of(inp: Any, weight: Any, **options: Any) -> Any:
        made = arguments.LinearBwdArgs(
            plan, torch.bfloat16, None, arguments.LinearWgrad(), True, None, torch.float32, (48, 32),
            (2, inp), (2, weight), **options,
        )  # fmt: skip
        return made.depends()

    met = [
        of(inp, weight, transpose_weight=turned)
        for inp in (None, plan.input.quantizer)
        for weight in quantizers.values()
        for turned in (False, True)
    ]
    assert all(one is not None and one[1] == [None, None] for one in met)
    values = [one[0] for one in met]
    same = plan.weight.quantizer is plan.kept_weight.quantizer
    assert len(set(values)) == (8 if same else 12)
    assert of(foreign, None) is None and of(None, foreign) is None
