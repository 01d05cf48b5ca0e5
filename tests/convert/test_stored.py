"""Frozen weights as one quantized copy: half the bytes, the bits of the plain ones, and nothing more to save."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert import Receipt

from .models import Conv1D, Model

STORED = {name: QUANTIZED[name] for name in ("delayed", "current", "block")}
OTHERS = {name: recipe for name, recipe in QUANTIZED.items() if name not in STORED}
CURRENT = STORED["current"]


def frozen(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*layers).to(DEVICE, torch.bfloat16).requires_grad_(False)


def step(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    return out.detach(), torch.autograd.grad(out.float().square().sum(), x)[0]


def inputs(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, features, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_(True)


@pytest.mark.parametrize("recipe", STORED.values(), ids=STORED)
@pytest.mark.parametrize(
    "sizes", [(256, 384, 128), (200, 300, 130), (7, 33, 1)], ids=["whole", "odd", "small"]
)
def test_outputs_and_gradients_are_those_of_plain_weights(recipe: Any, sizes: tuple[int, ...]) -> None:
    plain, stored = frozen(*sizes), frozen(*sizes)
    nc.convert(plain, recipe, small=True)
    nc.convert(stored, recipe, small=True, weights="stored")
    for _ in range(2):
        ours, theirs = step(stored, inputs(sizes[0])), step(plain, inputs(sizes[0]))
        if not recipe.delayed():  # whose plain weights are scaled by the amax of earlier steps
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        for a, b in zip(ours, theirs):
            assert a.isfinite().all()
            assert torch.cosine_similarity(a.flatten().float(), b.flatten().float(), 0) > 0.98
    high = frozen(*sizes)
    high.load_state_dict(
        {key: value for key, value in stored.state_dict().items() if key in high.state_dict()}
    )
    with nc.autocast(enabled=False):
        assert torch.equal(step(stored, inputs(sizes[0]))[0], step(high, inputs(sizes[0]))[0])


@pytest.mark.parametrize("name", ["current", "block"])
def test_compiled_and_copied_models_give_the_same(name: str) -> None:
    model = frozen(200, 300, 130)
    nc.convert(model, STORED[name], weights="stored")
    x = inputs(200)
    plain = step(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for other in (compiled, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(other, x), plain))


@pytest.mark.parametrize("recipe", STORED.values(), ids=STORED)
def test_bytes_are_halved_and_only_the_copy_is_saved(recipe: Any) -> None:
    model = frozen(512, 512)
    weight = model[0].weight
    receipt = nc.receipt(nc.convert(model, recipe, weights="stored"))
    buffers = [x for x in model[0].weight.get_data_tensors() if x is not None]
    held = sum(x.numel() * x.element_size() for x in buffers)
    assert held <= 0.53 * weight.numel() * 2
    bias = model[0].bias.numel() * 2
    assert (receipt.memory.parameters, receipt.memory.parameters_before) == (
        held + bias,
        weight.numel() * 2 + bias,
    )
    assert receipt.memory.quantized_weights == receipt.memory.saved_per_token == 0
    addresses = {x.data_ptr() for x in buffers}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(inputs(512))
    assert all(x.data_ptr() in addresses or x.numel() <= 8 for x in saved)


def test_nothing_is_quantized_but_activations_and_no_weight_gradient_runs() -> None:
    model = frozen(64, 96, 64)
    receipt = nc.receipt(nc.convert(model, CURRENT, weights="stored"))
    assert "Float8CurrentScaling, stored" in str(receipt) and all(one.stored for one in receipt.gemms)
    with receipt.recording():
        step(model, inputs(64))
    assert {(one.name, one.gemm) for one in receipt.ran()} == {
        (name, gemm) for name in "01" for gemm in ("fprop", "dgrad")
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, inputs(64))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (
        counts["narrowcast::quantize_operand"] == counts["narrowcast::quantize"] == 2
    )  # inputs and gradients
    assert counts["narrowcast::gemm"] == 4


def test_state_dicts_have_the_keys_and_load_strictly_both_ways() -> None:
    model, plain = frozen(64, 96, 64), frozen(64, 96, 64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    nc.convert(model, CURRENT, weights="stored")
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(type(value) is Tensor and value.dtype == torch.bfloat16 for value in state.values())
    assert (state["0.weight"] - before["0.weight"]).abs().max() <= before["0.weight"].abs().max() / 16
    plain.load_state_dict(state, strict=True)
    model.load_state_dict(before, strict=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_revert_keeps_the_values_of_the_copy() -> None:
    model = frozen(64, 96)
    attributes = set(model[0].__dict__)
    nc.convert(model, CURRENT, weights="stored")
    state = model.state_dict()
    nc.revert(model)
    assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter
    assert not model[0].weight.requires_grad and set(model[0].__dict__) == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_weights_that_train_or_are_tied_stay_and_say_so() -> None:
    model = nn.Sequential(Model(), Conv1D(8, 8)).requires_grad_(False)
    model[0].layers[0].up.weight.requires_grad_(True)
    receipt: Receipt = nc.receipt(nc.convert(model, CURRENT, heads=True, weights="stored"))
    said = {one.name.removeprefix("0."): (one.stored, one.reason) for one in receipt.gemms}
    assert said["layers.0.up"] == (False, "its weight trains, and is not stored quantized")
    assert said["head"] == (False, "its weight is tied, and is not stored quantized")
    assert said["1"] == (False, "its weights are not stored quantized")
    assert said["layers.0.down"] == (True, "")
    model[0](torch.arange(8).view(1, 8)).sum().backward()
    assert model[0].layers[0].up.weight.grad is not None


@pytest.mark.parametrize("recipe", OTHERS.values(), ids=OTHERS)
def test_recipes_of_two_different_directions_are_refused(recipe: Any) -> None:
    model = frozen(32, 32)
    with pytest.raises(ValueError, match=r"quantizes them differently; use Float8CurrentScaling"):
        nc.convert(model, recipe, weights="stored")
    assert type(model[0]) is nn.Linear


def test_what_cannot_be_raises() -> None:
    with pytest.raises(ValueError, match="finds no frozen weight"):
        nc.convert(nn.Linear(8, 8), CURRENT, weights="stored")
    with pytest.raises(
        ValueError,
        match="weights is 'fp8'; the nearest: 'fp8-channel'; use one of 'plain', 'stored', 'nvfp4', 'mxfp4', "
        "'mxfp6', 'mxfp8' or 'fp8-channel'$",
    ):
        nc.convert(nn.Linear(8, 8), CURRENT, weights="fp8")  # type: ignore[arg-type]
    for way, remedy in (
        ("compressed-tensors", "'stored' or 'fp8-channel'"),
        ("fp8-static", "'stored'"),
        ("bf16", "'plain'"),
    ):
        with pytest.raises(ValueError, match=f"is a format of narrowcast.export; use {remedy}$"):
            nc.convert(nn.Linear(8, 8), CURRENT, weights=way)  # type: ignore[arg-type]
    model = frozen(32, 32)
    nc.convert(model, CURRENT, weights="stored")
    with (
        pytest.raises(RuntimeError, match="the recipe in force wants MXFP8"),
        nc.autocast(recipe=QUANTIZED["mxfp8"]),
    ):
        model(inputs(32))


@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
def test_training_codes_without_master_weights_warns_and_with_them_moves(weights: Any) -> None:
    """A base that was frozen when it was stored, and is unfrozen: PyTorch's optimizers lose their steps to rounding."""
    model = frozen(48, 33)
    nc.convert(model, CURRENT, weights=weights)
    model.requires_grad_(True)
    values = model[0].weight.detach().dequantize()

    def train(optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(20):
            model(inputs(48)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (model[0].weight.detach().dequantize() - values).norm() / values.norm()

    with pytest.warns(UserWarning, match=r"small steps change nothing.*master_weights=True.*revert"):
        assert train(torch.optim.SGD(model.parameters(), lr=1e-6)) < 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(nc.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)) > 0.1
