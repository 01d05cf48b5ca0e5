"""Which events renew the scales of delayed scaling, of which layers, and how often."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import assert_same
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.compat.global_state import FP8GlobalStateManager
from narrowcast.layers import delayed
from narrowcast.recipe import DelayedScaling
from narrowcast.state import RecipeState, delayed_scaling

RECIPE = DelayedScaling(amax_history_len=4)


def made(features: int = 17, recipe: Any = RECIPE) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nc.Linear(features, 33, device="cpu"), nn.GELU(), nc.Linear(33, features, device="cpu")]
    model = nn.Sequential(*layers)
    return model if recipe is None else nc.set_recipe(model, recipe)


def show(model: nn.Module, size: float = 1.0) -> Tensor:
    features = next(model.parameters()).shape[1]
    x = size * torch.randn(5, features, generator=torch.Generator().manual_seed(1))
    loss = model(x).square().sum()
    loss.backward()
    return loss


def seen(model: Any) -> list[int]:
    """How many amaxes of its input each layer has in its history."""
    return [int(layer.amax_history[:, 0].count_nonzero()) for layer in (model[0], model[2])]


class Twice(torch.optim.SGD):
    """Steps by a step of its own class, as wrappers such as ZeRO and SAM do: the hook fires twice."""

    def step(self, closure: Any = None) -> Any:
        base = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)
        base.step()
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "FusedAdam": lambda p: nc.optimizers.FusedAdam(p, lr=0.1),
    "FusedSGD": lambda p: nc.optimizers.FusedSGD(p, lr=0.1),
    "twice": lambda p: Twice(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_renews_once(name: str) -> None:
    model = made()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(1, 4):
        for _ in range(2):  # microbatches
            show(model)
        assert seen(model) == [step - 1] * 2
        optimizer.step()
        assert seen(model) == [step] * 2 and not model[0].amax.any()
        optimizer.zero_grad()


def test_closures_of_one_step_renew_once() -> None:
    model = made()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    optimizer.step(lambda: show(model))
    assert seen(model) == [1, 1]


@pytest.mark.parametrize("algorithm", ["max", lambda history: history.amax(0)], ids=["max", "callable"])
def test_renewing_a_part_before_the_step_is_renewing_once(algorithm: Any) -> None:
    model = made(recipe=DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm))
    for size in (1.0, 2.0):
        show(model, size)
        nc.renew_delayed_scaling(model[0])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert seen(model) == [2, 2]


def test_renewing_twice_is_renewing_once() -> None:
    model = made()
    show(model)
    assert nc.renew_delayed_scaling(model) is model
    before = [buffer.clone() for buffer in model.buffers()]
    nc.renew_delayed_scaling(model)
    assert all(map(torch.equal, before, model.buffers()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_renews_nothing(fused: bool) -> None:
    """A fused optimizer's hook fires though it has written nothing, and says so on the device."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 2.0):
        kept = {name: one.clone() for name, one in model.state_dict().items() if "amax" not in name}
        scaler.scale(factor * model(torch.ones(5, 17)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if factor == float("inf"):
            state = model.state_dict()
            assert all(torch.equal(state[name], was) for name, was in kept.items())
            assert model[0].amax[0] == 1.0
    assert seen(model) == [2, 2]
    assert all(one.isfinite().all() for one in model.buffers())


@pytest.mark.parametrize("algorithm", ["max", lambda history: history.amax(0)], ids=["max", "callable"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_of_two_models_is_renewed_once(algorithm: Any, device: str) -> None:
    recipe = DelayedScaling(amax_history_len=16, amax_compute_algo=algorithm)
    models = [nn.ModuleList([made(recipe=None) for _ in range(8)]).to(device) for _ in range(2)]
    for part in models[1]:
        nc.set_recipe(part, recipe)
    for model in models:
        nc.set_recipe(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for part in model:
                part(torch.full((5, 17), 1.0 + step, device=device)).sum().backward()
            optimizer.step()
    named = [dict(model.named_buffers()) for model in models]
    assert_same(*({name: one for name, one in of.items() if "history" in name} for of in named))


def test_frozen_layers_are_renewed_with_their_model_alone() -> None:
    model, other = made(), made()
    for one in (model, other):
        one[0].requires_grad_(False)
        show(one)
    torch.optim.SGD(model[2].parameters(), lr=0.1).step()
    assert seen(model) == [1, 1] and seen(other) == [0, 0]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_without_a_step_of_its_own_is_renewed_with_any(frozen: bool, copied: bool) -> None:
    """As its copy, of which nobody knows that it was given its recipe: such as operations without parameters."""
    place = {"device": "cpu"}
    part = (
        nc.Linear(17, 17, **place) if frozen else nc.ops.Sequential(nc.ops.GELU(), nc.ops.Quantize(**place))
    )
    model = nn.Sequential(nc.set_recipe(part, RECIPE).requires_grad_(False), nc.Linear(17, 17, **place))
    model = copy.deepcopy(model) if copied else model
    for step in (1, 2):
        model(torch.randn(5, 17)).sum().backward()
        torch.optim.SGD(model[1].parameters(), lr=0.1).step()
        layer = model[0] if frozen else model[0][1]
        assert layer.amax_history[:, 0].count_nonzero() == step


def test_a_step_renews_what_it_changes_in_one_model() -> None:
    model = made()
    show(model)
    torch.optim.SGD(model[2].parameters(), lr=0.1).step()
    assert seen(model) == [0, 1]
    torch.optim.SGD(model[0].parameters(), lr=0.1).step()
    assert seen(model) == [1, 1]


def test_frozen_layers_of_an_autocast_are_renewed_with_any_step() -> None:
    model, plain = made(recipe=None), nn.Linear(3, 3)
    model[0].requires_grad_(False)
    with nc.autocast(recipe=RECIPE):
        loss = model(torch.randn(5, 17)).sum()
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert seen(model) == [1, 0]


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_in_the_backward_renew_what_they_change(frozen: bool) -> None:
    """Not the layers whose backwards are still to come; frozen ones are left to the loop's own step."""
    model, plain = made(), made()
    for one in (model, plain):
        one[0].requires_grad_(not frozen)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    steps = nc.optimizers.step_in_backward(optimizer, [model[0], model[2]])
    for step in (1, 2):
        for one in (model, plain):
            show(one)
        assert seen(model) == [step - frozen, step]
        optimizer.step()
        other.step()
        assert seen(model) == [step, step]
        for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values()):
            assert torch.equal(ours, theirs)
        other.zero_grad()
    steps.remove()


def test_a_loop_without_an_optimizer_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_scaling, "_SAID", set())
    monkeypatch.setattr(delayed, "LOOK_EVERY", 3)
    x = torch.ones(1, 3)

    def told(change: Callable[[nc.Linear, int], Any]) -> list[str]:
        layer = nc.Linear(3, 3, device="cpu", recipe=RECIPE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(30):
                layer(x).sum().backward()
                with torch.no_grad():
                    change(layer, step)
        return [str(one.message) for one in caught if "renews its scales" in str(one.message)]

    def renewed(layer: nc.Linear, step: int) -> None:
        layer.weight.mul_(0.9)
        nc.renew_delayed_scaling(layer)

    assert not told(renewed)
    assert not told(lambda layer, step: None)  # accumulation of many parts
    assert not told(lambda layer, step: layer.weight.mul_(0.9) if step == 5 else None)  # such as a checkpoint
    (message,) = told(lambda layer, step: layer.weight.mul_(0.9))
    assert "call narrowcast.renew_delayed_scaling(model) after each change" in message and len(message) <= 300
    assert not told(lambda layer, step: layer.weight.mul_(0.9))


def test_by_transformer_engines_name() -> None:
    model = made()
    show(model)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    assert model[0].scale[0] > 0 and model[0].scale[2] > 0


def test_state_of_quantizers_alone_is_renewed_with_any_step() -> None:
    state = RecipeState.create(RECIPE, mode="forward", num_quantizers=3, device="cpu")
    state.make_quantizers()[0](torch.full((2, 16), 7.0))
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    assert state.scale is not None and state.scale[0] == 64.0


def test_it_belongs_outside_of_graphs() -> None:
    model = made()
    with pytest.raises(Exception, match="belongs outside of compiled code"):
        torch.compile(lambda: nc.renew_delayed_scaling(model), backend="eager", fullgraph=True)()


def test_a_copy_is_renewed_by_its_own_optimizer() -> None:
    model = made()
    show(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = copy.deepcopy(model)
    show(twin, 3.0)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert seen(model) == [1, 1] and seen(twin) == [2, 2]
