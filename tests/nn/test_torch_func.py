"""``torch.func``: ``functional_call`` works; the transforms work on a Linear without a recipe, and else say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import narrowcast as nc

QUANTIZER = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
TRANSFORMED = {
    "grad": lambda layer, x: grad(lambda x: layer(x).square().sum())(x),
    "vmap": lambda layer, x: vmap(layer)(x.view(2, 4, 32)),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,)),
    "per-sample": lambda layer, x: vmap(grad(lambda p, x: functional_call(layer, p, (x,)).sum()), (None, 0))(
        dict(layer.named_parameters()), x
    ),
}


class Tokens(torch.nn.Module):
    """Rows as a batch of one sequence, for attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 1, x.shape[-1])


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_functional_call_runs_on_other_parameters(recipe: Any) -> None:
    layer, other = (nc.Linear(32, 48, device=DEVICE, recipe=recipe) for _ in range(2))
    x = torch.randn(8, 32, device=DEVICE)
    parameters = {name: value.detach().requires_grad_() for name, value in other.named_parameters()}
    for model in (layer, other):
        if recipe.delayed():
            model.load_state_dict({**layer.state_dict(), **dict(model.named_parameters())})
    torch.manual_seed(1)
    ours = torch.autograd.grad(functional_call(layer, parameters, (x,)).square().sum(), parameters.values())
    torch.manual_seed(1)
    theirs = torch.autograd.grad(other(x).square().sum(), list(other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_a_transform_is_refused_with_the_layers_name_in_quotes() -> None:
    model = nc.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    with pytest.raises(NotImplementedError, match="^'0' is inside a transform of torch.func"):
        torch.func.vmap(model)(torch.randn(2, 8, 32))


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize(
    "make",
    [
        lambda **own: nc.Linear(32, 48, device=DEVICE, **own),
        lambda **own: nc.LayerNormLinear(32, 48, device=DEVICE, **own),
        lambda **own: nc.LayerNormMLP(32, 48, device=DEVICE, **own),
    ],
    ids=["Linear", "LayerNormLinear", "LayerNormMLP"],
)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_transforms_refuse_a_recipe_with_the_reason(recipe: str, make: Any, name: str) -> None:
    layer, x = make(recipe=QUANTIZED[recipe]), torch.randn(8, 32, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"transform of torch\.func .*functional_call"):
        TRANSFORMED[name](layer, x)


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("recipe", [QUANTIZED["current"], None], ids=["current", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nc.LayerNorm(32, device=DEVICE),
        lambda: nc.RMSNorm(32, device=DEVICE),
        lambda: nc.LayerNormMLP(32, 48, device=DEVICE),
        lambda: nc.LayerNormLinear(32, 96, parameters_split=("q", "k", "v"), device=DEVICE),
        lambda: torch.nn.Sequential(Tokens(), nc.TransformerLayer(32, 48, 2, device=DEVICE)),
        lambda: nc.ops.Sequential(nc.ops.Linear(32, 48, device=DEVICE), nc.ops.GELU()),
    ],
    ids=["LayerNorm", "RMSNorm", "LayerNormMLP", "parts", "TransformerLayer", "operations"],
)
def test_other_layers_refuse_with_the_reason(make: Any, recipe: Any, name: str) -> None:
    layer, x = make(), torch.randn(8, 32, device=DEVICE)
    with (
        nc.autocast(enabled=recipe is not None, recipe=recipe),
        pytest.raises(NotImplementedError, match=r"transform of torch\.func .*functional_call"),
    ):
        TRANSFORMED[name](layer, x)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_work_in_high_precision(name: str) -> None:
    layer, x = (
        nc.Linear(32, 48, device=DEVICE, recipe=QUANTIZED["current"]),
        torch.randn(8, 32, device=DEVICE),
    )
    plain = torch.nn.Linear(32, 48, device=DEVICE)
    plain.load_state_dict(layer.state_dict())
    with nc.autocast(enabled=False):
        ours = TRANSFORMED[name](layer, x)
    theirs = TRANSFORMED[name](plain, x)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nc.RMSNorm(32, device=DEVICE),
        lambda: nc.Linear(32, 48, device=DEVICE),
        lambda: nc.LayerNormLinear(32, 48, device=DEVICE),
        lambda: nc.LayerNormMLP(32, 48, device=DEVICE),
        lambda: nc.ops.Sequential(nc.ops.Linear(32, 48, device=DEVICE), nc.ops.GELU()),
    ],
    ids=["RMSNorm", "Linear", "LayerNormLinear", "LayerNormMLP", "operations"],
)
def test_compiled_transforms_are_right_or_refused(make: Any) -> None:
    model, x = make(), torch.randn(8, 32, device=DEVICE, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=QUANTIZED["current"]):
            return model(x).square().sum()

    expected = torch.autograd.grad(loss(x), x)[0]
    run = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    if torch.torch_version.TorchVersion(torch.__version__) < "2.15" and not isinstance(model, nc.RMSNorm):
        with pytest.raises(Exception, match=r"compiled transform of torch\.func .*functional_call"):
            run(x.detach())
    else:
        assert torch.equal(run(x.detach()), expected)


def tangent_of(function: Any, x: torch.Tensor) -> torch.Tensor | None:
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(out).tangent


MADE = {
    "quantizer": lambda: QUANTIZER,
    "decoded": lambda: lambda x: QUANTIZER(x).dequantize(),
    "ops.GELU": nc.ops.GELU,
    "ops.SwiGLU": nc.ops.SwiGLU,
    "ops.Linear": lambda: nc.ops.Linear(32, 48, device=DEVICE),
    "GroupedLinear": lambda: Grouped(32, 48),
    "LayerNorm": lambda: nc.LayerNorm(32, device=DEVICE),
    "Linear": lambda: nc.Linear(32, 48, device=DEVICE),
}


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("recipe", [QUANTIZED["delayed"], None], ids=["delayed", "none"])
@pytest.mark.parametrize("name", MADE)
def test_no_tangent_is_dropped(name: str, recipe: Any, trains: bool) -> None:
    """In forward mode, too, a derivative is right or refused, with gradients and without."""
    made, x = MADE[name](), torch.randn(6, 32, device=DEVICE)
    if isinstance(made, torch.nn.Module):
        made.requires_grad_(trains)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode():
                if name == "Linear" and recipe is None:
                    assert torch.equal(tangent_of(made, x), made(torch.ones_like(x)) - made(0 * x))
                    continue
                with pytest.raises(NotImplementedError, match="jvp"):
                    tangent_of(made, x)
                with forward_ad.dual_level():
                    made(x)  # without a tangent it runs


class Grouped(nc.GroupedLinear):
    """Two groups of any number of rows."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(2, *sizes, device=DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, [1, len(x) - 1])  # type: ignore[return-value]
