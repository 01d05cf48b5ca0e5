"""The first step of delayed scaling with constants may saturate; a calibration prevents it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.layers import policies
from narrowcast.quantizers import Quantizer
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, Recipe, delayed, with_first_scales
from narrowcast.recipe.base import Mode
from narrowcast.state import delayed_scaling

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_scaling, "_SAID", set())


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have the first scales of those whose codes are joined with other ranks'."""
    of_recipe = delayed.delayed_quantizer

    def told(recipe: DelayedScaling, kind: str) -> Quantizer:
        mode: Mode = "backward" if kind.startswith("grad") else "forward"
        return with_first_scales([of_recipe(recipe, kind)], recipe, mode)[0]

    monkeypatch.setattr(delayed, "delayed_quantizer", told)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nc.Linear(64, 64, device="cpu"), nc.LayerNormMLP(64, 128, device="cpu"))


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """Of the sum of the outputs: at the last layer they are 1, beyond the first scale's 7/8."""
    model.zero_grad()
    run(x).sum().backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("initial", ["range", "one"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.covering
@pytest.mark.usefixtures("joined")
def test_the_first_step_is_as_right_as_current_scaling(initial: Any, compiled: bool, rows: int) -> None:
    model, x = two_layers(), torch.randn(32, 64)
    plain = gradients(model, model, x)
    current = nc.set_recipe(copy.deepcopy(model), Float8CurrentScaling())
    delayed = nc.set_recipe(model, DelayedScaling(amax_history_len=rows, initial_scale=initial))
    run: Any = torch.compile(delayed, backend="aot_eager", fullgraph=True) if compiled else delayed
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert nc.calibrate_delayed_scaling(delayed, lambda: run(x).sum().backward()) is delayed
        first = gradients(run, delayed, x)
        gradients(run, delayed, x)  # its renewal finds nothing to tell
    assert distance(first, plain) < 1.1 * distance(gradients(current, current, x), plain)


def test_calibrating_leaves_everything_else_as_it_was() -> None:
    model = nn.Sequential(two_layers(), nn.Dropout(0.5), nn.BatchNorm1d(64))
    nc.set_recipe(model, RECIPE)
    x = torch.randn(32, 64)
    gradients(model, model, x)
    grads = [parameter.grad for parameter in model.parameters()]
    values = [grad.clone() for grad in grads if grad is not None]
    own = {name: value.clone() for name, value in model[2].state_dict().items()}
    model[0][0].weight.main_grad = torch.ones(64, 64)
    state = torch.get_rng_state()

    seen = []

    def step() -> None:
        seen.append([parameter.grad for parameter in model.parameters()])
        model(x).square().sum().backward()
        model[0][0].weight.main_grad.add_(1)

    nc.calibrate_delayed_scaling(model, step)
    # What one pass allocates, the next does not add to: it may be the memory of a replayed CUDA graph.
    assert all(one is grad for kept in seen for one, grad in zip(kept, grads, strict=True))
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads))
    assert all(torch.equal(grad, value) for grad, value in zip((g for g in grads if g is not None), values))
    assert all(torch.equal(value, own[name]) for name, value in model[2].state_dict().items())
    assert (model[0][0].weight.main_grad == 1).all() and torch.equal(torch.get_rng_state(), state)
    assert model[0][0].amax_history_bwd.any()


def test_two_passes_unless_told_otherwise() -> None:
    model, x, calls = nc.set_recipe(two_layers(), RECIPE), torch.randn(32, 64), []

    def step() -> None:
        assert model[0].weight.grad is None
        calls.append(model(x).sum().backward())

    nc.calibrate_delayed_scaling(model, step)
    assert len(calls) == 2
    nc.calibrate_delayed_scaling(model, step, passes=1)
    assert len(calls) == 3


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    model = nc.set_recipe(two_layers(), RECIPE)
    model[0].weight.grad = mine = torch.ones(64, 64)
    with pytest.raises(ZeroDivisionError):
        nc.calibrate_delayed_scaling(model, lambda: 1 // 0)
    assert model[0].weight.grad is mine


def test_under_an_autocast() -> None:
    model, x = two_layers(), torch.randn(32, 64)

    def step() -> None:
        with nc.autocast(recipe=RECIPE):
            y = model(x)
        y.sum().backward()

    nc.calibrate_delayed_scaling(model, step)
    assert model[0].scale_bwd[0] != 65536 and model[0].amax_history_bwd.any()


@pytest.mark.parametrize("recipe_of", ["root", "autocast", "policy"])
def test_with_checkpoints(recipe_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state, the gradients after it, and the random numbers are those of a calibration without checkpoints."""

    def keeps_the_first(recipe: Recipe, shapes: Any, dtype: torch.dtype) -> tuple[Recipe | None, str]:
        return (recipe if (32, 64, 64) in shapes else None), "the test says so"

    monkeypatch.setitem(policies.POLICIES, "first", keeps_the_first)

    def trained(reentrant: bool | None) -> tuple[dict[str, Tensor], Tensor]:
        model, x = two_layers(), torch.randn(32, 64, requires_grad=True)
        model.insert(1, nn.Dropout(0.5))  # type: ignore[operator]
        if recipe_of != "autocast":
            chosen = {"policy": "first", "rows": 32} if recipe_of == "policy" else {}
            nc.set_recipe(model, RECIPE, **chosen)

        def run(x: Tensor) -> Tensor:
            for block in (model[:2], model[2:]):  # type: ignore[index]
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            return x

        def step() -> None:
            under = nc.autocast(recipe=RECIPE) if recipe_of == "autocast" else nullcontext()
            with under:
                run(x).sum().backward()

        nc.calibrate_delayed_scaling(model, step)
        assert all(p.grad is None for p in model.parameters())
        step()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return {name: buffer.clone() for name, buffer in model.named_buffers()}, torch.cat(grads)

    state, grads = trained(None)
    assert len(state) == (6 if recipe_of == "policy" else 18)
    for reentrant in (True, False):
        torch.manual_seed(0)
        found, of_checkpoints = trained(reentrant)
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
        assert torch.equal(of_checkpoints, grads)


def test_a_policy_that_keeps_high_precision_leaves_nothing_to_calibrate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(policies.POLICIES, "none", lambda *_: (None, "the test says so"))
    model, x = nc.set_recipe(two_layers(), RECIPE, policy="none", rows=32), torch.randn(32, 64)
    with pytest.raises(RuntimeError, match="collected an amax under delayed scaling.*policy"):
        nc.calibrate_delayed_scaling(model, lambda: model(x).sum().backward())


def test_what_cannot_be_calibrated_is_refused() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="passes is 0"):
        nc.calibrate_delayed_scaling(model, lambda: None, passes=0)
    with pytest.raises(RuntimeError, match="no layer of this Sequential collected an amax"):
        nc.calibrate_delayed_scaling(model, lambda: None)
    nc.set_recipe(model, RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="has changed a parameter"):
        nc.calibrate_delayed_scaling(model, step)


def test_nothing_is_read_off_fake_tensors() -> None:
    with FakeTensorMode():
        model, x = nc.set_recipe(two_layers(), RECIPE), torch.randn(32, 64)
        for _ in range(2):
            gradients(model, model, x)
