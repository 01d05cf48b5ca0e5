"""A NaN or an infinity leaves every module as one, under every recipe, so that a GradScaler skips its step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recipes import DEVICE, MORE_FORMATS, RECIPES
from torch import Tensor, nn

import narrowcast as nc

ALL = {**RECIPES, **MORE_FORMATS}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **kwargs: nc.Linear(64, 64, bias=False, **kwargs),
    "LayerNormLinear": lambda **kwargs: nc.LayerNormLinear(64, 64, bias=False, **kwargs),
    "LayerNormMLP": lambda **kwargs: nc.LayerNormMLP(64, 64, bias=False, **kwargs),
    "GroupedLinear": lambda **kwargs: nc.GroupedLinear(2, 64, 64, bias=False, **kwargs),
}
GROUPED = ("none", "delayed", "current")
CASES = [(kind, name) for kind in MODULES for name in (GROUPED if kind == "GroupedLinear" else ALL)]


def step(
    module: nn.Module, x: Tensor, recipe: nc.recipe.Recipe | None, dy: Tensor, *args: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().requires_grad_()
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *args)
    y = y[0] if isinstance(y, tuple) else y
    wanted = {"x": x, **{name: p for name, p in module.named_parameters() if p.dim() > 1}}
    return y.detach(), dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy)))


def is_lost(result: Tensor) -> bool:
    return not result.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_nothing_is_swallowed(kind: str, name: str, value: float) -> None:
    args = ([24, 8],) if kind == "GroupedLinear" else ()
    for dtype in (torch.bfloat16, torch.float16):
        module = MODULES[kind](params_dtype=dtype, device=DEVICE)
        x, dy = (torch.randn(32, 64, dtype=dtype, device=DEVICE) for _ in range(2))
        bad_x, bad_dy = x.clone(), dy.clone()
        bad_x[3, 5] = bad_dy[3, 5] = value
        y, gradients = step(module, bad_x, ALL[name], dy, *args)
        assert is_lost(y) and any(map(is_lost, gradients.values())), "in x"
        y, gradients = step(module, x, ALL[name], bad_dy, *args)
        assert not is_lost(y), "in dy"
        used = {
            grad_of: g for grad_of, g in gradients.items() if grad_of != "weight1"
        }  # row 3 is of the first group
        assert all(map(is_lost, used.values())), "in dy"
        with torch.no_grad():
            next(p for p in module.parameters() if p.dim() > 1)[3, 5] = value
        y, gradients = step(module, x, ALL[name], dy, *args)
        assert is_lost(y) and is_lost(gradients["x"]), "in the weight"


@pytest.mark.parametrize("name", ALL)
def test_grad_scaler_skips_the_step(name: str) -> None:
    """The scaled gradient of the loss overflows in fp16, and no rounding hides it from the fp32 parameters."""
    model = nn.Sequential(*(nc.Linear(64, 64, bias=False, device=DEVICE, recipe=ALL[name]) for _ in "ab"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(32, 64, device=DEVICE)
    for steps, skipped in ((1, True), (12, False)):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                y = model(x)
            assert y.dtype == torch.float16
            scaler.scale(0.1 * y.float().sum()).backward()  # 0.1 * 2**20 is beyond fp16
            scaler.step(optimizer)
            scaler.update()
        unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        assert unchanged == skipped and scaler.get_scale() < 2.0**20
    assert all(p.isfinite().all() for p in model.parameters())
