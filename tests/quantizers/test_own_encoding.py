"""Subclasses of quantizers that encode in their own way: nothing of what the parent's encoding allows is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import narrowcast as nc
from narrowcast.dynamo import register_value_opaque_quantizer
from narrowcast.quantizers import DelayedFloat8Quantizer, Float8GroupsQuantizer
from narrowcast.recipe import plan

E4M3 = nc.DType.kFloat8E4M3


class Signs(nc.Float8CurrentScalingQuantizer):
    """Encodes signs, which every format holds exactly."""

    def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None, *others: Any) -> list[Tensor]:
        assert isinstance(x, Tensor)
        return super()._encode(numerics, x.sign(), seed)


class SignsInBlocks(nc.Float8BlockQuantizer):
    def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        assert isinstance(x, Tensor)
        return super()._encode(numerics, x.sign(), seed)


class ScaledSigns(DelayedFloat8Quantizer):
    def _encode_scaled(self, numerics: Any, x: Tensor, scale: Tensor, amax: Tensor | None) -> list[Tensor]:
        assert isinstance(x, Tensor)
        return super()._encode_scaled(numerics, x.sign(), scale, amax)


for one in (Signs, SignsInBlocks, ScaledSigns):
    register_value_opaque_quantizer(one)

QUANTIZERS = {
    "current": lambda role: Signs(E4M3, force_pow_2_scales=True),
    "blocks": lambda role: SignsInBlocks(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
}


def test_no_gemm_encodes_in_its_place() -> None:
    """The kernel for few rows knows the rules of the library's own formats only."""
    assert nc.Float8CurrentScalingQuantizer(E4M3)._prologue() is not None
    for own in (
        *(make(None) for make in QUANTIZERS.values()),
        ScaledSigns(E4M3, 0),
        Float8GroupsQuantizer(E4M3),
    ):
        assert own._prologue() is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("first", [None, True], ids=["each", "kept"])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "grouped"])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_every_operand_goes_by_the_rule_of_the_subclass(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, first: bool | None, compiled: bool
) -> None:
    monkeypatch.setattr(plan, "SMALL_WEIGHT", 0)  # the backward quantizes it again
    recipe = nc.recipe.CustomRecipe(qfactory=QUANTIZERS[kind], emulate=True)
    options: dict[str, Any] = {"bias": False, "device": "cpu", "recipe": recipe}
    layer: Any = {
        "linear": lambda: nc.Linear(48, 32, **options),
        "layernorm_linear": lambda: nc.LayerNormLinear(48, 32, **options),
        "grouped": lambda: nc.GroupedLinear(1, 48, 32, **options),
    }[name]()
    weight = layer.weight0 if name == "grouped" else layer.weight
    x, grad = torch.randn(16, 48, requires_grad=True), torch.randn(16, 32)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out = forward(x, *[[16]] * (name == "grouped"), is_first_microbatch=first)
    out.backward(grad)
    inp = functional.layer_norm(x, (48,)) if name == "layernorm_linear" else x
    assert torch.equal(out, inp.sign() @ weight.sign().t())
    assert torch.equal(weight.grad, grad.sign().t() @ inp.sign())
    if name != "layernorm_linear":
        assert torch.equal(x.grad, grad.sign() @ weight.sign())


def test_a_subclass_that_takes_a_scale_gets_plain_tensors() -> None:
    state = torch.ones(1), torch.zeros(1)
    x = torch.randn(8, 16)
    codes, *_ = nc.functional.act_quantize(x, "relu", ScaledSigns(E4M3, 0), [], None, *state)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), x.relu().sign())


def test_reducing_with_an_encoding_of_ones_own_is_refused() -> None:
    with pytest.raises(ValueError, match="has with_amax_reduction=True and an _encode of its own"):
        Signs(E4M3, with_amax_reduction=True).quantize(torch.randn(4, 16), amax_reduction_group="group")


def test_an_encoding_with_too_few_buffers_is_no_tensor() -> None:
    class Short(nc.MXFP8Quantizer):
        def _encode(self, numerics: Any, x: Tensor, seed: Tensor | None) -> list[Tensor]:
            return super()._encode(numerics, x, seed)[:3]

    with pytest.raises(ValueError, match="shorter"):
        Short(E4M3).quantize(torch.ones(32, 32))
