"""Frozen weights in four bits: .30 of the bytes, the bits of the decoded weights, and nothing else to save."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from recipes import DEVICE, MORE_FORMATS, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert.stored import DECODED, FOUR_BITS

from .models import Conv1D, Model
from .test_stored import frozen, inputs, step

CURRENT = QUANTIZED["current"]
RECIPES = {
    **{name: recipe for name, recipe in QUANTIZED.items() if name != "custom"},
    "mxfp4": MORE_FORMATS["mxfp4"],
    "kept": nc.recipe.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": nc.recipe.Float8CurrentScaling(backward_override="dequantized"),
}


def decoded(model: nn.Sequential) -> nn.Sequential:
    """Return the plain model with the values of the copies."""
    plain = nn.Sequential(*[nn.Linear(x.in_features, x.out_features) for x in model])  # type: ignore[arg-type]
    plain.to(DEVICE, torch.bfloat16).requires_grad_(False)
    state = {key: value for key, value in model.state_dict().items() if key in plain.state_dict()}
    plain.load_state_dict(state)
    return plain


@pytest.mark.covering
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("weights", DECODED)
@pytest.mark.parametrize("sizes", [(64, 160, 32), (100, 90, 130), (7, 33, 1)], ids=["whole", "odd", "small"])
def test_outputs_and_gradients_are_those_of_the_decoded_weights(
    recipe: Any, weights: Any, sizes: tuple[int, ...]
) -> None:
    model = frozen(*sizes)
    before = model[0].weight.float().clone()
    nc.convert(model, recipe, small=True, weights=weights, blocks=True)
    plain = nc.convert(decoded(model), recipe, small=True, blocks=True)
    for _ in range(2):
        torch.manual_seed(2)
        ours = step(model, inputs(sizes[0]))
        torch.manual_seed(2)
        theirs = step(plain, inputs(sizes[0]))
        assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(ours, theirs))
    error = (model[0].weight.dequantize().float() - before).norm() / before.norm()
    assert 0.05 < error < 0.16 if weights in FOUR_BITS else 0.01 < error < 0.05
    with nc.autocast(enabled=False), torch.no_grad():
        high = decoded(model)
        assert torch.equal(model(inputs(sizes[0])), high(inputs(sizes[0])))


@pytest.mark.parametrize("weights", FOUR_BITS)
def test_bytes_are_at_most_thirty_percent_and_only_the_copy_is_saved(weights: Any) -> None:
    model = frozen(512, 640)
    weight = model[0].weight
    receipt = nc.receipt(nc.convert(model, CURRENT, weights=weights))
    (one,) = receipt.gemms
    assert one.stored and one.stored_as == weights
    assert f"Float8CurrentScaling, stored as {weights}" in str(receipt)
    buffers = [x for x in model[0].weight.get_data_tensors() if x is not None]
    held, bias = sum(x.numel() * x.element_size() for x in buffers), model[0].bias.numel() * 2
    assert held <= 0.3 * weight.numel() * 2
    memory = receipt.memory
    assert (memory.parameters, memory.parameters_before) == (held + bias, weight.numel() * 2 + bias)
    assert memory.quantized_weights == memory.saved_per_token == 0
    addresses = {x.data_ptr() for x in buffers}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(inputs(512))
    assert {x.data_ptr() for x in saved} >= addresses
    # a scale of current scaling is found again from maxima of parts of the weight
    assert sum(x.numel() * x.element_size() for x in saved if x.data_ptr() not in addresses) < 0.02 * held
    with receipt.recording():
        step(model, inputs(512))
    assert {(ran.name, ran.gemm) for ran in receipt.ran()} == {("0", "fprop"), ("0", "dgrad")}


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp6", "fp8-channel"])
def test_compiled_and_copied_models_give_the_same_and_save_no_decoded_weight(weights: Any) -> None:
    model = frozen(200, 320, 136)
    nc.convert(model, CURRENT, weights=weights)
    x = inputs(200)
    plain = step(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    for other in (compiled, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(other, x), plain))
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        compiled(x)
    copies = sum(
        buffer.nbytes for layer in model for buffer in layer.weight.get_data_tensors() if buffer is not None
    )
    assert sum(sizes) < 1.1 * copies


@pytest.mark.parametrize("spread", [14, 15])
def test_mxfp4_is_exact_in_eight_bits_if_scales_are_powers_of_two(spread: int) -> None:
    """E4M3 holds E2M1 times fifteen neighboring powers of two."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)).clamp_(-6, 6)
    weight[:, :32] *= 2.0**-spread
    weight[:, 0], weight[:, 1], weight[:, 127] = 0.5 * 2.0**-spread, 6.0 * 2.0**-spread, 6.0
    values = FOUR_BITS["mxfp4"].quantize(weight.bfloat16()).dequantize()
    tiles = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2)
    eight = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, force_pow_2_scales=True)
    for quantizer in (tiles, eight):
        assert torch.equal(quantizer.quantize(values).dequantize(), values) == (spread == 14)


@pytest.mark.parametrize("weights", DECODED)
def test_state_dicts_revert_and_other_recipes(weights: Any) -> None:
    model = frozen(96, 64, 96)
    attributes, keys = set(model[0].__dict__), list(model.state_dict())
    nc.convert(model, CURRENT, weights=weights)
    state = model.state_dict()
    assert list(state) == keys and all(type(value) is Tensor for value in state.values())
    model.load_state_dict(state, strict=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    nc.convert(model, QUANTIZED["mxfp8"])  # the copy serves every recipe
    assert [one.stored_as for one in nc.receipt(model).gemms] == [weights, weights]
    step(model, inputs(96))
    with pytest.raises(ValueError, match=rf"stored as '{weights}', not 'stored'; call narrowcast.revert"):
        nc.convert(model, CURRENT, weights="stored")
    nc.revert(model)
    assert type(model[0]) is nn.Linear and set(model[0].__dict__) == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_weights_that_train_are_tied_or_are_none_of_a_linear_stay_and_say_so() -> None:
    model = nn.Sequential(Model(), Conv1D(8, 8)).requires_grad_(False)
    model[0].layers[0].up.weight.requires_grad_(True)
    receipt = nc.receipt(nc.convert(model, CURRENT, heads=True, weights="mxfp4"))
    said = {one.name.removeprefix("0."): (one.stored_as, one.reason) for one in receipt.gemms}
    assert said["layers.0.up"] == ("", "its weight trains, and is not stored quantized")
    assert said["head"] == ("", "its weight is tied, and is not stored quantized")
    assert said["1"] == ("", "its weights are not stored quantized")
    assert said["layers.0.down"] == ("mxfp4", "")
    with pytest.raises(ValueError, match="weights='nvfp4' finds no frozen weight"):
        nc.convert(nn.Linear(8, 8), CURRENT, weights="nvfp4")
