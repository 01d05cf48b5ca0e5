"""Ranking layers: the planted bad one comes first, and the model is left as it was."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc

PLANTED = 2


def stack(recipe: Any) -> Any:
    """Five layers, of which one has a weight with an outlier that takes the range of its scale."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Dropout(0.1)).to(DEVICE)
    with torch.no_grad():
        model[PLANTED].weight[3, 5] = 3e4
        model[PLANTED - 1].weight[5].zero_()  # which meets no input
        model[PLANTED - 1].bias[5] = 0
    nc.convert(model, recipe)
    return model


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_the_planted_layer_is_named_first(name: str) -> None:
    model, batch = (
        stack(QUANTIZED[name]),
        torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    loss(model(batch)).backward()  # delayed scaling has a history, parameters have gradients
    state = copy.deepcopy(model.state_dict())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    result = nc.bisect(model, batch, loss=loss)
    assert result.worst == str(PLANTED)
    assert result.layers[0].gradient > 3 * result.layers[1].gradient
    assert len(result.layers) == 5 and result.together.gradient > 0.5 * result.layers[0].gradient
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[key], state[key]) for key in state)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), grads))
    assert torch.equal(torch.get_rng_state(), random)
    assert nc.get_recipes(model) == {str(index): QUANTIZED[name] for index in range(5)}
    lines = str(result).splitlines()
    assert lines[2].startswith("2 ") and lines[-1].startswith("all together")


def test_batches_of_every_kind_and_recipes_that_are_given() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nc.Linear(32, 32, device="cpu"), nc.Linear(32, 32, device="cpu")

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return SimpleNamespace(loss=(self.second(self.first(x)) - y).square().mean())

    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(16, 32), torch.randn(16, 32)
    recipe = QUANTIZED["mxfp8"]
    by_name = nc.bisect(model, {"x": x, "y": y}, recipe=recipe)
    assert nc.bisect(model, (x, y), recipe=recipe) == by_name
    assert {one.layer for one in by_name.layers} == {"first", "second"}
    assert [one.layer for one in nc.bisect(model, (x, y), recipe=recipe, only="second").layers] == ["second"]
    assert model.first.recipe is None


def test_what_cannot_be_ranked_is_said() -> None:
    model = nn.Sequential(nc.Linear(32, 32, device="cpu"))
    x = torch.randn(16, 32)
    with pytest.raises(ValueError, match="no layer of the model has a recipe"):
        nc.bisect(model, x, loss=loss)
    with pytest.raises(
        ValueError, match="the model has no layer of narrowcast; call narrowcast.convert first"
    ):
        nc.bisect(nn.Linear(32, 32), x, loss=loss, recipe="current")
    nc.set_recipe(model, QUANTIZED["current"])
    with pytest.raises(
        ValueError, match=r"the loss has shape \(16, 32\); return one number, such as its mean"
    ):
        nc.bisect(model, x, loss=lambda y: y)
    with pytest.raises(TypeError, match="without a loss"):
        nc.bisect(model, x)
    for value, told in ((2.5, "2.5, of type float"), (torch.ones(()), r"tensor\(1.\)")):
        with pytest.raises(TypeError, match=f"^loss returned {told}.*; return a tensor with a gradient"):
            nc.bisect(model, x, loss=lambda out, value=value: value)
    with pytest.raises(TypeError, match="^loss does not take the model's result alone .*'target'"):
        nc.bisect(model, x, loss=nn.MSELoss())
    with pytest.raises(
        TypeError, match="^the model, a Sequential, does not take the batch .* belong in loss="
    ):
        nc.bisect(model, (x, x), loss=nn.MSELoss())
    with pytest.raises(TypeError, match="unsupported operand"):  # its own, not of its arguments
        nc.bisect(model, x, loss=lambda out: out + "a")
    with pytest.raises(ValueError, match="^the gradients in high precision have norm nan, "):
        nc.bisect(model, x * math.nan, loss=loss)
    with pytest.raises(ValueError, match="all 0"):
        nc.bisect(model, x, loss=lambda out: (out * 0).sum())
    with nc.autocast(recipe=QUANTIZED["current"]), pytest.raises(RuntimeError, match="inside an autocast"):
        nc.bisect(model, x, loss=loss)
    assert model[0].recipe is QUANTIZED["current"]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        nc.bisect(model, x, loss=loss)


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_weight_gradients_that_go_elsewhere_are_compared_and_left_as_they_were(option: str) -> None:
    def stack_of_two(**options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nc.Linear(48, 48, device="cpu", **options) for _ in range(2)))
        for layer in model:
            layer.weight.main_grad = torch.ones(48, 48)
        return nc.set_recipe(model, QUANTIZED["current"])

    x = torch.randn(17, 48)
    plain, model, twin = stack_of_two(), stack_of_two(**{option: True}), stack_of_two(**{option: True})
    for one in (model, twin):
        loss(one(x)).backward()
    if option == "fuse_wgrad_accumulation":
        model[0].weight.grad_added_to_main_grad = False
    assert nc.bisect(model, x, loss=loss) == nc.bisect(plain, x, loss=loss)
    assert not getattr(model[0].weight, "grad_added_to_main_grad", False)
    for ours, theirs in zip(model, twin):
        ours.backward_dw(), theirs.backward_dw()
        assert torch.equal(ours.weight.main_grad, theirs.weight.main_grad)
        assert (ours.weight.grad is None) == (theirs.weight.grad is None) == (option != "delay_wgrad_compute")
        assert ours.weight.grad is None or torch.equal(ours.weight.grad, theirs.weight.grad)
        if option == "delay_wgrad_compute":
            ours.wgrad_stores["weight"].assert_empty()


def test_a_forward_before_has_its_backward_after() -> None:
    model, x = stack(QUANTIZED["delayed"]), torch.randn(9, 64).to(DEVICE)
    model[-1].p = 0.0
    loss(model(x)).backward()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.zero_grad()
        value = loss(one(x))
        if one is model:
            nc.bisect(one, x, loss=loss)
        value.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_model_before_its_first_step_is_still_before_it() -> None:
    model = nn.Sequential(nc.Linear(48, 48, device="cpu"), nc.LayerNormMLP(48, 96, device="cpu"))
    nc.set_recipe(model, QUANTIZED["delayed"])
    twin, x = copy.deepcopy(model), torch.randn(17, 48)
    nc.bisect(model, x, loss=loss)
    results = []
    for one in (model, twin):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1000)
        out = one(x)
        loss(out).backward()
        results.append([out, *(parameter.grad for parameter in one.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))
