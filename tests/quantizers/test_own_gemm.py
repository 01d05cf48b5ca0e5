"""Quantizers of users that multiply by themselves: every layer runs on them, eager, and compiled once registered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.quantizers import GEMMType, MMParams

BF16 = torch.bfloat16
CALLS: list[tuple[Any, ...]] = []


@dataclasses.dataclass
class Made(nc.QuantizedTensorStorage):
    """What such quantizers make, as Transformer Engine's users write it."""

    data: Any = None
    scale: Any = None
    data_t: Any = None
    scale_t: Any = None
    dtype: Any = None
    device: Any = None
    _quantizer: Any = None


class PerTensor(nc.Quantizer):
    """Current scaling in plain PyTorch; it compiles once it is registered."""

    dtype_name: str

    def __init__(self, dtype_name: str) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.internal = True
        self.dtype_name = dtype_name

    def quantize(self, tensor: Tensor, **kwargs: Any) -> Made:
        dtype = getattr(torch, self.dtype_name)
        scale = torch.finfo(dtype).max / tensor.abs().amax().float()
        codes = (tensor.float() * scale).to(dtype)
        return Made(codes, 1 / scale, codes.t().contiguous(), 1 / scale, tensor.dtype, tensor.device, self)

    def qgemm(
        self, qx: Tensor, qw: Tensor, m_params: MMParams, out_dtype: torch.dtype, sx: Tensor, sw: Tensor,
        bias: Tensor | None = None, out: Any = None, accumulate: bool = False,
        gemm_type: GEMMType = GEMMType.FPROP, qresult_x: Any = None, qresult_w: Any = None,
    ) -> Tensor:  # fmt: skip
        CALLS.append((gemm_type.value, m_params, bias is not None, type(qresult_x), type(qresult_w)))
        product = qx.float() @ qw.float().t() * (sx * sw)
        return (product if bias is None else product + bias.float()).to(out_dtype)


class Unregistered(PerTensor):
    pass


nc.dynamo.register_value_opaque_quantizer(PerTensor)


def factory(kind: type[PerTensor]) -> Any:
    def own(role: nc.QuantizerRole) -> nc.Quantizer:
        return kind("float8_e5m2" if role.tensor_type in ("grad_output", "grad_input") else "float8_e4m3fn")

    return own


RECIPES = {
    kind.__name__: nc.recipe.CustomRecipe(qfactory=factory(kind)) for kind in (PerTensor, Unregistered)
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": BF16}
LAYERS: dict[str, Any] = {
    "linear": (lambda: nc.Linear(64, 32, **OPTIONS), ()),
    "layernorm_linear": (lambda: nc.LayerNormLinear(64, 32, **OPTIONS), ()),
    "layernorm_mlp": (lambda: nc.LayerNormMLP(64, 96, **OPTIONS), ()),
    "grouped": (lambda: nc.GroupedLinear(2, 64, 32, **OPTIONS), ([8, 24],)),
    "ops": (lambda: nc.ops.Sequential(nc.ops.RMSNorm(64, **OPTIONS), nc.ops.Linear(64, 32, **OPTIONS)), ()),
}


def step(layer: Any, recipe: Any, x: Tensor, *extra: Any, forward: Any = None) -> list[Tensor]:
    with nc.autocast(recipe=recipe):
        y = (layer if forward is None else forward)(x, *extra)
    wanted = [x, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), wanted)]


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_multiply_by_it(name: str, kind: str) -> None:
    make, extra = LAYERS[name]
    layer, x = make(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    CALLS.clear()
    ours = step(layer, RECIPES[kind], x, *extra)
    gemms = {"layernorm_mlp": 2, "grouped": 2}.get(name, 1)
    assert sorted(call[0] for call in CALLS) == sorted(["fprop", "dgrad", "wgrad"] * gemms)
    assert all(call[3] is call[4] is Made for call in CALLS)
    for mine, theirs in zip(ours, step(layer, nc.recipe.Float8CurrentScaling(), x, *extra), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["linear", "layernorm_mlp"])
def test_compiled(name: str) -> None:
    make, extra = LAYERS[name]
    layer, x = make(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    expected = step(layer, RECIPES["PerTensor"], x, *extra)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    CALLS.clear()
    for mine, theirs in zip(
        step(layer, RECIPES["PerTensor"], x, *extra, forward=forward), expected, strict=True
    ):
        assert torch.equal(mine, theirs)
    assert len(CALLS) == (6 if name == "layernorm_mlp" else 3)


def test_one_that_is_no_value_is_refused_in_one_graph() -> None:
    layer, x = LAYERS["linear"][0](), torch.randn(32, 64, dtype=BF16)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with (
        nc.autocast(recipe=RECIPES["Unregistered"]),
        pytest.raises(torch._dynamo.exc.Unsupported, match="qgemm of its own is not a compile-time value"),  # type: ignore[attr-defined]
    ):
        forward(x)


def test_all_operands_or_none() -> None:
    def some(role: nc.QuantizerRole) -> nc.Quantizer:
        return PerTensor("float8_e4m3fn") if role.tensor_type == "input" else nc.IdentityQuantizer()

    layer = nc.Linear(64, 32, name="head", **OPTIONS)
    with (
        nc.autocast(recipe=nc.recipe.CustomRecipe(qfactory=some)),
        pytest.raises(
            ValueError, match="of head are quantized by PerTensor, IdentityQuantizer, IdentityQuantizer"
        ),
    ):
        layer(torch.randn(32, 64, dtype=BF16))
