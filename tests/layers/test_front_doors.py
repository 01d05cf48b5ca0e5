"""The contract of a linear layer over every front door: modules, operations, function, converted and grouped layers.

Each door gives the bits of ``nc.Linear`` with the same parameters; the one with a norm gives those of the norm and then
``nc.Linear``. What a door has beyond that is tested beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import TOKENS, assert_same, make_input, step
from recipes import DEVICE, QUANTIZED, RECIPES
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import DelayedScales, LinearFunction, LinearFwdArgs, LinearWgrad
from narrowcast.recipe import linear_plan
from narrowcast.state import THREAD
from narrowcast.testing import assert_close

K, N = 48, 80  # not multiples of every block size


class Function(nn.Module):
    """The autograd function, given the plan of the recipe in force."""

    def __init__(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k, device=DEVICE, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n, device=DEVICE, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        recipe, recorded = THREAD.state.recipe, torch.is_grad_enabled()
        needs = [recorded and tensor.requires_grad for tensor in (x, self.weight, self.bias)]
        if recipe is None:
            return F.linear(x, self.weight, self.bias)
        plan = linear_plan(
            recipe, "", needs[0], needs[1], module_type="linear", weight_elements=self.weight.numel()
        )
        if torch.is_autocast_enabled(DEVICE):
            x = x.to(torch.get_autocast_dtype(DEVICE))
        args = LinearFwdArgs(plan, x.dtype, DelayedScales(), None, LinearWgrad(), needs[2])
        return LinearFunction.apply(self.weight, x, self.bias, args)


class OneGroup(nn.Module):
    """A grouped layer whose one group has all rows."""

    def __init__(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nc.GroupedLinear(1, k, n, device=DEVICE, params_dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, [x.numel() // x.shape[-1]])


def converted(k: int, n: int, dtype: torch.dtype) -> nn.Module:
    return nc.convert(
        nn.Sequential(nn.Linear(k, n, device=DEVICE, dtype=dtype)),
        nc.recipe.Float8CurrentScaling(),
        heads=True,
        small=True,
    )


@dataclasses.dataclass(frozen=True)
class Door:
    """``build(in_features, out_features, dtype)``; ``names``: of its parameters, in those of the layer behind it."""

    build: Callable[[int, int, torch.dtype], nn.Module]
    names: dict[str, str]
    has_norm: bool = False
    keeps_state: bool = True  # whether it has scales between its steps
    adds_bias_apart: bool = False  # rounds the product before it adds the bias, under torch.autocast


def names_of(prefix: str) -> dict[str, str]:
    return {f"{prefix}weight": "weight", f"{prefix}bias": "bias"}


DOORS = {
    "linear": Door(lambda k, n, dtype: nc.Linear(k, n, device=DEVICE, params_dtype=dtype), names_of("")),
    "layernorm_linear": Door(
        lambda k, n, dtype: nc.LayerNormLinear(k, n, device=DEVICE, params_dtype=dtype),
        {**names_of(""), "layer_norm_weight": "norm.weight", "layer_norm_bias": "norm.bias"},
        has_norm=True,
    ),
    "operations": Door(
        lambda k, n, dtype: nc.ops.Linear(k, n, device=DEVICE, dtype=dtype),
        {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"},
        adds_bias_apart=True,
    ),
    "basic_linear": Door(
        lambda k, n, dtype: nc.ops.BasicLinear(k, n, device=DEVICE, dtype=dtype), {"weight": "weight"}
    ),
    "function": Door(Function, names_of(""), keeps_state=False),
    "converted": Door(converted, names_of("0.")),
    "grouped": Door(OneGroup, {"layer.weight0": "weight", "layer.bias0": "bias"}),
}
OTHERS = [name for name in DOORS if name != "linear"]


class Behind(nn.Module):
    """``nc.Linear``, after a norm if the door has one, with the door's parameters."""

    def __init__(self, door: Door, front: nn.Module, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        of_layer = {door.names[name]: value.detach() for name, value in front.named_parameters()}
        self.norm = nc.LayerNorm(k, device=DEVICE, dtype=dtype) if door.has_norm else None
        self.linear = nc.Linear(k, n, "bias" in of_layer, device=DEVICE, params_dtype=dtype)
        with torch.no_grad():
            for name, value in of_layer.items():
                self.get_parameter(name if "." in name else f"linear.{name}").copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.norm is None else self.norm(x))


def pair(
    name: str, k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, nn.Module]:
    """A layer by its door, and the one behind it."""
    torch.manual_seed(1)
    front = DOORS[name].build(k, n, dtype)
    with torch.no_grad():
        for parameter in front.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    return front, Behind(DOORS[name], front, k, n, dtype)


def by_layer(name: str, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """A door's results under the names of the layer behind it."""
    names = {own: layer if "." in layer else f"linear.{layer}" for own, layer in DOORS[name].names.items()}
    return {
        f"d {names.get(key[2:], key[2:])}" if key[:2] == "d " else key: value
        for key, value in results.items()
    }


def recipe_of(door: str, name: str) -> Any:
    if name == "delayed" and not DOORS[door].keeps_state:
        pytest.skip("the scales are those that the caller keeps")
    return RECIPES[name]


@pytest.mark.covering
@pytest.mark.parametrize("door", OTHERS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("lead", [(24,), (7,), (3, 5), (1,), (0,), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(48, 80), (5, 3), (130, 1), (1, 17)])
def test_gives_the_bits_of_linear(door: str, name: str, lead: tuple[int, ...], k: int, n: int) -> None:
    """Two steps, so that delayed scaling moves its scales."""
    recipe, (front, behind) = recipe_of(door, name), pair(door, k, n)
    for seed in (0, 1):
        x = make_input(k, *lead, seed=seed)
        ours, theirs = by_layer(door, step(front, x, recipe)), step(behind, x, recipe)
        assert ours["out0"].shape == (*lead, n) and ours["d input"].shape == x.shape
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(door: str, name: str, dtype: torch.dtype) -> None:
    recipe, (front, behind), x = recipe_of(door, name), pair(door, dtype=dtype), make_input(K, dtype=dtype)
    ours, theirs = by_layer(door, step(front, x, recipe)), step(behind, x, recipe)
    if recipe is not None:
        assert_same(ours, theirs)
    else:  # PyTorch sums the gradient of a bias in its own order
        for key, value in theirs.items():
            assert_close(ours[key], value, "fp32_sum_order" if dtype == torch.float32 else "bf16_output")
    assert all(tensor.dtype == dtype and torch.isfinite(tensor).all() for tensor in ours.values())


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RECIPES)
def test_input_and_gradient_of_any_strides(door: str, name: str) -> None:
    recipe = recipe_of(door, name)
    x = make_input(TOKENS, K).detach().t().requires_grad_(True)
    assert not x.is_contiguous()
    ours = step(pair(door)[0], x, recipe)
    assert_same(ours, step(pair(door)[0], x.detach().contiguous().requires_grad_(True), recipe))
    grad, results = torch.randn(N, TOKENS, device=DEVICE).bfloat16().t(), []
    for given in (grad, grad.contiguous()):
        torch.manual_seed(7)
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = pair(door)[0](x)
        results.append(torch.autograd.grad(y, x, given))
    (dx,), (expected,) = results
    if recipe is not None:
        assert torch.equal(dx, expected)
    else:  # PyTorch's product, which has another order of sums for each layout
        assert_close(dx, expected, "bf16_output")


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RECIPES)
def test_under_torch_autocast(door: str, name: str) -> None:
    recipe, (front, behind) = recipe_of(door, name), pair(door, dtype=torch.float32)
    x = make_input(K, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours, theirs = by_layer(door, step(front, x, recipe)), step(behind, x, recipe)
    assert ours["out0"].dtype == torch.bfloat16 and ours["d input"].dtype == torch.float32
    if recipe is not None and not DOORS[door].adds_bias_apart:
        assert_same(ours, theirs)
    elif recipe is None:  # PyTorch keeps a gradient in bf16 until it reaches the weight
        for key, value in theirs.items():
            assert_close(ours[key].to(value.dtype), value, "bf16_output")
    else:
        assert_close(ours["out0"], theirs["out0"], "bf16_output")


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("manager", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients(door: str, name: str, manager: Any) -> None:
    recipe, (front, behind), x = recipe_of(door, name), pair(door), make_input(K).detach()
    with manager(), nc.autocast(enabled=recipe is not None, recipe=recipe):
        out = front(x)
        assert torch.equal(out, behind(x)) and not out.requires_grad


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_retained_graph_gives_the_same_gradients_again(door: str, name: str) -> None:
    recipe, (front, _), x = recipe_of(door, name), pair(door), make_input(K)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        loss = front(x).float().square().sum()
    results = []
    for retain in (True, False):
        torch.manual_seed(7)
        results.append(torch.autograd.grad(loss, [x, *front.parameters()], retain_graph=retain))
    assert all(map(torch.equal, *results))


@pytest.mark.covering(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_second_order_is_refused(door: str, name: str) -> None:
    recipe, (front, _), x = recipe_of(door, name), pair(door), make_input(K)
    with nc.autocast(recipe=recipe):
        y = front(x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        dx.float().sum().backward()


@pytest.mark.covering
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["none", "delayed", "block", "nvfp4"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight+input"])
def test_what_is_frozen_gets_no_gradient(door: str, name: str, frozen: str) -> None:
    recipe, (front, behind), x = recipe_of(door, name), pair(door), make_input(K)
    parts = frozen.split("+")
    if "input" in parts:
        x = x.detach()
    for module in (front, behind):
        for own, parameter in module.named_parameters():
            parameter.requires_grad_(DOORS[door].names.get(own, own.removeprefix("linear.")) not in parts)
    if not any(parameter.requires_grad for parameter in front.parameters()):
        pytest.skip("nothing wants a gradient")
    ours = by_layer(door, step(front, x, recipe))
    assert not ours.keys() & {f"d {part}" for part in (*parts, *(f"linear.{part}" for part in parts))}
    assert_same(ours, step(behind, x, recipe))
