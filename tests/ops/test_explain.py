"""``Sequential.explain``: what is chosen, what nearly was, and how that reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ops_checks import only, unfused
from torch import nn

import narrowcast as nc
from narrowcast.ops import Bias, ConstantScale, FusedOperation, Identity, Sequential
from narrowcast.ops.explain import ChosenOperation, MissedFusion
from narrowcast.ops.fused import Fusion, Match, NearMiss, follows


class BiasScale(FusedOperation):
    pass


def _bias_scale(ops: Any, start: int, recipe: Any) -> Any:
    if not follows(ops, start, Bias, ConstantScale):
        return None
    return Match(2) if recipe is not None else NearMiss("no recipe is in force")


FORWARD = Fusion("BiasScale", "forward", _bias_scale, BiasScale)
BACKWARD = Fusion(
    "BackwardScales",
    "backward",
    lambda ops, start, recipe: Match(2) if follows(ops, start, ConstantScale, ConstantScale) else None,
    FusedOperation,
)


def block() -> Sequential:
    return Sequential(
        Identity(), Bias(7), ConstantScale(2.0), nn.Tanh(), Bias(7), ConstantScale(1.0), ConstantScale(3.0)
    )


def test_records(capsys: pytest.CaptureFixture[str]) -> None:
    with only(forward=[FORWARD], backward=[BACKWARD]):
        explanation = block().explain(nc.recipe.Float8CurrentScaling())
    assert explanation.forward == (
        ChosenOperation("forward", "Identity", (0,), ("Identity",)),
        ChosenOperation("forward", "BiasScale", (1, 2), ("Bias", "ConstantScale")),
        ChosenOperation("forward", "BiasScale", (3, 4), ("Bias", "ConstantScale")),
        ChosenOperation("forward", "ConstantScale", (5,), ("ConstantScale",)),
    )
    assert [(one.name, one.numbers) for one in explanation.backward] == [
        ("FusedOperation", (4, 5)),
        ("Bias", (3,)),
        ("ConstantScale", (2,)),
        ("Bias", (1,)),
        ("Identity", (0,)),
    ]
    assert [one.is_fused for one in explanation.backward] == [True, False, False, False, False]
    assert explanation.near_misses == ()
    assert capsys.readouterr().out == f"{explanation}\n"


def test_near_misses_tell_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with only(forward=[FORWARD]):
        explanation = block().explain()
    assert explanation.near_misses == (
        MissedFusion("forward", "BiasScale", 1, "no recipe is in force"),
        MissedFusion("forward", "BiasScale", 3, "no recipe is in force"),
    )
    assert capsys.readouterr().out == (
        "forward\n"
        "  0  Identity\n"
        "  1  Bias\n"
        "  2  ConstantScale\n"
        "  3  Bias\n"
        "  4  ConstantScale\n"
        "  5  ConstantScale\n"
        "backward\n"
        "  5  ConstantScale\n"
        "  4  ConstantScale\n"
        "  3  Bias\n"
        "  2  ConstantScale\n"
        "  1  Bias\n"
        "  0  Identity\n"
        "not fused\n"
        "  1  BiasScale (forward)  no recipe is in force\n"
        "  3  BiasScale (forward)  no recipe is in force\n"
    )


def test_fused_operations_show_what_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    with only(forward=[FORWARD]):
        block().explain(nc.recipe.Float8CurrentScaling())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["    0  Identity", "  1-2  BiasScale      Bias + ConstantScale"]


def test_a_taken_operation_is_no_near_miss() -> None:
    never = Fusion("Never", "forward", lambda ops, start, recipe: NearMiss("never"), FusedOperation)
    with only(forward=[FORWARD, never]):
        explanation = block().explain(nc.recipe.Float8CurrentScaling())
    assert [miss.number for miss in explanation.near_misses] == [0, 5]


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if "torch.compile" in code:
            code = code[: code.index("compiled =")]
        exec(code, namespace)
    assert capsys.readouterr().out == shown


def test_without_operations_there_is_nothing_to_say() -> None:
    with pytest.raises(TypeError, match="recipe is 8, of type int; pass one of narrowcast.recipe's recipes"):
        block().explain(8)  # type: ignore[arg-type]
    with unfused():
        explanation = Sequential(nn.Tanh()).explain()
    assert (explanation.forward, explanation.backward, str(explanation)) == ((), (), "forward\nbackward")


def test_what_is_handed_over_quantized() -> None:
    place = {"device": "cpu"}
    mlp = Sequential(
        nc.ops.LayerNorm(32, **place),
        nc.ops.BasicLinear(32, 64, **place),
        nc.ops.SwiGLU(),
        nc.ops.BasicLinear(32, 32, **place),
        nc.ops.GELU(),
    )
    recipe = nc.recipe.DelayedScaling()
    explanation = mlp.explain(recipe)
    assert [(one.direction, one.giver, one.taker, one.numbers) for one in explanation.handed_over] == [
        ("forward", "LayerNorm", "BasicLinear", (0, 1)),
        ("forward", "SwiGLU", "BasicLinear", (2, 3)),
        ("backward", "SwiGLU", "BasicLinear", (2, 1)),
        ("backward", "GELU", "BasicLinear", (4, 3)),
    ]
    assert mlp[1]._last_recipe is None and mlp[1].scale is None and not nc.state.is_fp8_enabled()
    assert mlp.explain(None).handed_over == ()
    kept = nc.recipe.Float8CurrentScaling(backward_override="high_precision")
    assert mlp.explain(kept).handed_over == ()
