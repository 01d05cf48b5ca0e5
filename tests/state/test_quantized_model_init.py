"""Parameters made inside quantized_model_init are quantized, in the format of the recipe's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delayed_simulation import clean_autocast, draw, make_layer
from recipes import QUANTIZED

import narrowcast as nc
from narrowcast import state
from narrowcast.recipe import linear_plan

__all__ = ["clean_autocast"]
TYPES = {
    "delayed": nc.Float8Tensor,
    "current": nc.Float8Tensor,
    "mxfp8": nc.MXFP8Tensor,
    "block": nc.Float8BlockwiseQTensor,
    "nvfp4": nc.NVFP4Tensor,
    "custom": nc.MXFP8Tensor,
}


def initialised(recipe: Any, **kwargs: Any) -> nc.Linear:
    with nc.quantized_model_init(recipe=recipe, **kwargs):
        return make_layer()


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe(name: str) -> None:
    recipe = QUANTIZED[name]
    layer, plain = initialised(recipe), make_layer()
    assert type(layer.weight) is TYPES[name]
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.requires_grad
    assert type(layer.bias) is torch.nn.Parameter
    assert layer.weight.get_usages() == {"rowwise": True, "columnwise": True}
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").kept_weight.quantizer
    if name == "delayed":  # no history yet: scaled by its own amax
        quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    expected = quantizer.quantize(plain.weight.detach())
    for ours, theirs in zip(layer.weight.get_data_tensors(), expected.get_data_tensors()):
        assert torch.equal(ours, theirs)

    with nc.autocast(recipe=recipe):
        y = layer(draw(0, 6, 24))
    y.square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (40, 24)
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", sorted(set(QUANTIZED) - {"delayed"}))
def test_quantized_weight_computes_like_the_plain_one(name: str) -> None:
    x, outs = draw(0, 6, 24), []
    for layer in (initialised(QUANTIZED[name]), make_layer()):
        with nc.autocast(recipe=QUANTIZED[name]):
            outs.append(layer(x))
    assert torch.equal(*outs)


def layers(recipe: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    with nc.quantized_model_init(recipe=recipe):
        return {
            "Linear": nc.Linear(64, 64, **options),
            "LayerNormLinear": nc.LayerNormLinear(64, 64, **options),
            "LayerNormMLP": nc.LayerNormMLP(64, 64, **options),
            "ops": nc.ops.Sequential(nc.ops.Linear(64, 64, **options)),
            "GroupedLinear": nc.GroupedLinear(1, 64, 64, single_grouped_parameter=True, **options),
        }


def held_bytes(layer: torch.nn.Module) -> int:
    quantized: list[Any] = [
        p for p in layer.parameters() if isinstance(p, (nc.QuantizedTensor, nc.GroupedTensor))
    ]
    assert quantized
    return sum(b.nbytes for parameter in quantized for b in parameter.get_data_tensors() if b is not None)


@pytest.mark.parametrize(
    "recipe", [nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling()], ids=["current", "mxfp8"]
)
def test_layers_for_inference_hold_half_the_bytes(recipe: Any) -> None:
    with torch.no_grad():
        small = layers(recipe)
    for name, layer in layers(recipe).items():
        assert (
            2 * held_bytes(small[name]) <= held_bytes(layer) + 8
        )  # one scale of a tensor serves both directions
        small[name].load_state_dict(layer.state_dict(), strict=False)
        x = torch.randn(32, 64).bfloat16()
        rest = ([32],) if name == "GroupedLinear" else ()
        with torch.no_grad(), nc.autocast(recipe=recipe):
            assert torch.equal(small[name](x, *rest), layer(x, *rest))
        x.requires_grad_()
        with nc.autocast(recipe=recipe):
            if isinstance(recipe, nc.recipe.MXFP8BlockScaling):
                with pytest.raises(RuntimeError, match="no column-wise data .* torch.no_grad"):
                    small[name](x, *rest)
                continue
            grads = [torch.autograd.grad(made(x, *rest).sum(), x)[0] for made in (small[name], layer)]
            assert torch.equal(*grads)


def test_preserved_initial_value() -> None:
    plain = make_layer()
    for recipe in QUANTIZED.values():
        layer = initialised(recipe, preserve_high_precision_init_val=True)
        kept = layer.weight.get_high_precision_init_val()
        assert torch.equal(kept, plain.weight)
        assert kept.device.type == "cpu"
        assert not kept.requires_grad
        layer.weight.clear_high_precision_init_val()
        assert layer.weight.get_high_precision_init_val() is None
        assert initialised(recipe).weight.get_high_precision_init_val() is None


def test_nested_and_re_entered() -> None:
    current, mxfp8 = nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling()
    made = []
    context = nc.quantized_model_init(recipe=current, preserve_high_precision_init_val=True)
    with context:
        made.append(make_layer())
        with nc.quantized_model_init(recipe=mxfp8):
            made.append(make_layer())
            with nc.quantized_model_init(enabled=False, recipe=mxfp8):
                made.append(make_layer())
                with context:  # the same one, inside itself
                    made.append(make_layer())
                assert not state.with_fp8_parameters()
            made.append(make_layer())
        made.append(make_layer())
        assert state.with_fp8_parameters()
    made.append(make_layer())
    with context:
        made.append(make_layer())
    kinds = [type(layer.weight) for layer in made]
    f8, mx, plain = nc.Float8Tensor, nc.MXFP8Tensor, torch.nn.Parameter
    assert kinds == [f8, mx, plain, f8, mx, f8, plain, f8]
    kept = [getattr(layer.weight, "_high_precision_init_val", None) is not None for layer in made]
    assert kept == [kind is f8 for kind in kinds]


def test_exceptions_restore_the_state() -> None:
    with pytest.raises(KeyError), nc.quantized_model_init(recipe=nc.recipe.MXFP8BlockScaling()):
        raise KeyError
    assert not state.with_fp8_parameters()
    assert type(make_layer().weight) is torch.nn.Parameter


def test_default_recipe_and_autocast_are_independent() -> None:
    with nc.quantized_model_init():
        assert type(make_layer().weight) is nc.Float8Tensor
        assert not state.is_fp8_enabled()
    with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling()):
        assert not state.with_fp8_parameters()
        assert type(make_layer().weight) is torch.nn.Parameter


def test_custom_recipe_sees_the_name() -> None:
    roles = []

    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        roles.append(role)
        return nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)

    with nc.quantized_model_init(recipe=nc.recipe.CustomRecipe(qfactory=factory)):
        make_layer(name="fc1")
    assert nc.QuantizerRole("linear", "weight", "fc1") in roles


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_backward_refuses_a_weight_written_after_its_forward(name: str) -> None:
    """As of a plain parameter: dgrad would silently multiply with the new values."""
    recipe = QUANTIZED[name]
    with nc.quantized_model_init(recipe=recipe):
        layer = nc.Linear(32, 64, recipe=recipe)
    x = torch.randn(48, 32, device=layer.weight.device, requires_grad=True)
    y = layer(x)
    layer.weight.grad = torch.ones(64, 32, device=x.device)
    torch.optim.SGD([layer.weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    layer(x).sum().backward()
