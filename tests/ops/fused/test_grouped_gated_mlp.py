"""Experts whose activation is computed as it is quantized: values of the three operations, less that is written."""

from __future__ import annotations

import copy
from typing import Any

import ops_checks
import pytest
import torch
from modules import assert_same, step
from ops_checks import make_inputs, unfused
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast import ops
from narrowcast.functional import replay

K, F, ROWS = 64, 136, 40
FUSED = ("delayed", "current", "block")
ACTIVATIONS: dict[str, Any] = {
    "swiglu": ops.SwiGLU,
    "geglu": ops.GEGLU,
    "clamped": lambda: ops.ClampedSwiGLU(limit=0.5),
}


class Experts(nn.Module):
    """Two groups: half of the rows, a quarter; the last quarter belongs to nobody."""

    def __init__(self, activation: Any = "swiglu", bias: bool = False, single: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16, "single_grouped_weight": single}
        self.mlp = ops.Sequential(
            ops.GroupedLinear(2, K, 2 * F, bias=bias, **options),
            ACTIVATIONS[activation]() if isinstance(activation, str) else activation,
            ops.GroupedLinear(2, F, K, **options),
        )
        self.register_buffer("quarters", torch.tensor([2, 1], device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        splits = self.quarters * (x.shape[0] // 4)
        return self.mlp(x, splits, splits)


def chosen(experts: Experts, recipe: Any) -> list[str]:
    explanation = experts.mlp.explain(recipe)
    return [one.name for one in (*explanation.forward, *explanation.backward)]


class Written(TorchDispatchMode):
    """Activations, and gradients of them, that are written in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "narrowcast" and "act" in func.name():
            self.names.append(func.name().rpartition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", FUSED)
@pytest.mark.parametrize(("activation", "single"), [("swiglu", True), ("geglu", False), ("clamped", True)])
def test_equals_the_three_operations(activation: str, single: bool, recipe: str) -> None:
    made = [Experts(activation, single=single) for _ in range(2)]
    assert chosen(made[0], RECIPES[recipe]) == ["GroupedGatedMLP"] * 2
    for seed in range(2):  # delayed scaling learns from the first step
        inputs = make_inputs([(ROWS, K)], seed=seed)
        with unfused():
            expected = step(made[0], inputs, RECIPES[recipe])
        with Written() as written:
            ours = step(made[1], inputs, RECIPES[recipe])
        assert_same(ours, expected)
        assert written.names == ["grouped_act_quantize", "grouped_act_backward_quantize"]


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_compiled(recipe: str) -> None:
    """For two numbers of rows in one graph."""
    eager = Experts()
    compiled = copy.deepcopy(eager)
    forward = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (ROWS, ROWS + 8):
        inputs = make_inputs([(rows, K)], seed=rows)
        ours = step(compiled, inputs, RECIPES[recipe], forward)
        assert_same(ours, step(eager, inputs, RECIPES[recipe]))


def test_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth step is that of a list that is not recorded; another activation has a recording of its own."""
    monkeypatch.setattr(replay, "ON_CPU", True)
    results = []
    for enabled in (True, False):
        monkeypatch.setattr(replay, "ENABLED", enabled)
        replay._known.clear()
        made = [Experts("clamped"), Experts(ops.ClampedSwiGLU(limit=0.25))]
        inputs = make_inputs([(ROWS, K)])
        results.append([step(one, inputs, RECIPES["current"]) for _ in range(4) for one in made][-2:])
    replay._known.clear()
    for ours, expected in zip(*results, strict=True):
        assert_same(ours, expected)
    assert not torch.equal(*(one["out0"] for one in results[0]))


def test_no_grad_two_backwards_and_checkpoints() -> None:
    for check in (
        ops_checks.check_without_gradients,
        ops_checks.check_backwards,
        ops_checks.check_recomputed,
    ):
        check(Experts(), [(ROWS, K)], RECIPES["current"])


@pytest.mark.parametrize("frozen", ["mlp.0.weight", "mlp.2.weight"])
def test_frozen_weights(frozen: str) -> None:
    experts = Experts()
    experts.get_parameter(frozen).requires_grad_(False)
    inputs = make_inputs([(ROWS, K)])
    with unfused():
        expected = step(experts, inputs, RECIPES["block"])
    assert_same(step(experts, inputs, RECIPES["block"]), expected)


@pytest.mark.parametrize(
    ("experts", "recipe", "reason"),
    [
        (Experts(), "none", "the recipe is none"),
        (Experts(), "mxfp8", "the recipe is MXFP8BlockScaling"),
        (Experts(bias=True), "block", "has biases"),
        (Experts(ops.SwiGLU(glu_interleave_size=8)), "block", "glu_interleave_size"),
    ],
)
def test_what_runs_one_by_one(experts: Experts, recipe: str, reason: str) -> None:
    assert "GroupedGatedMLP" not in chosen(experts, RECIPES[recipe])
    assert reason in str(experts.mlp.explain(RECIPES[recipe]))
    with unfused():
        expected = step(experts, make_inputs([(ROWS, K)]), RECIPES[recipe])
    assert_same(step(experts, make_inputs([(ROWS, K)]), RECIPES[recipe]), expected)


def test_a_gradient_in_codes() -> None:
    """The second layer reads rows of codes, the first one the gradient of the activation."""
    experts, x = Experts(), make_inputs([(ROWS, K)])[0]
    codes = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3, columnwise=False).quantize(
        torch.randn(ROWS, K).bfloat16().to(DEVICE)
    )
    results = []
    for grad in (codes, codes.dequantize()):
        with nc.autocast(recipe=RECIPES["block"]):
            y = experts(x)
        results.append(torch.autograd.grad(y, [x, *experts.parameters()], grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
