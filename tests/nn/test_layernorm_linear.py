"""LayerNormLinear equals LayerNorm or RMSNorm and then Linear, bit for bit, eager and compiled, in every recipe."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import (
    assert_same,
    check_no_grad,
    check_retained_graph,
    compare_compiled,
    make_input,
    randomized,
    step,
)
from recipes import DEVICE, QUANTIZED, RECIPES, kinds
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.testing import assert_close

K, N = 48, 80  # not multiples of every block size


def make_layer(k: int = K, n: int = N, **kwargs: Any) -> nc.LayerNormLinear:
    torch.manual_seed(1)
    kwargs.setdefault("params_dtype", torch.bfloat16)
    return randomized(nc.LayerNormLinear(k, n, device=DEVICE, **kwargs))


class Composed(nn.Module):
    """The same layer made of two modules."""

    def __init__(self, layer: nc.LayerNormLinear, also_norm: bool = False) -> None:
        super().__init__()
        kind = nc.LayerNorm if layer.norm.normalization == "LayerNorm" else nc.RMSNorm
        dtype, zero_centered = layer.weight.dtype, layer.norm.zero_centered_gamma
        self.norm = kind(layer.in_features, zero_centered_gamma=zero_centered, device=DEVICE, dtype=dtype)
        self.linear = nc.Linear(
            layer.in_features, layer.out_features, layer.bias is not None, params_dtype=dtype, device=DEVICE
        )
        self.also_norm = also_norm
        with torch.no_grad():
            self.norm.weight.copy_(layer.layer_norm_weight)
            self.linear.weight.copy_(layer.weight)
            for ours, theirs in ((self.norm.bias, layer.layer_norm_bias), (self.linear.bias, layer.bias)):
                if ours is not None:
                    ours.copy_(theirs)

    def forward(self, x: Tensor) -> Any:
        normalized = self.norm(x)
        out = self.linear(normalized)
        return (out, normalized) if self.also_norm else out


NAMES = {
    "d norm.weight": "d layer_norm_weight",
    "d norm.bias": "d layer_norm_bias",
    "d linear.weight": "d weight",
    "d linear.bias": "d bias",
}


def renamed(results: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {NAMES.get(name, name): tensor for name, tensor in results.items()}
    return {name: found[name] for name in like}


def compare_composed(layer: nc.LayerNormLinear, recipe: Any, steps: int = 1, **kwargs: Any) -> None:
    composed = Composed(layer, layer.return_layernorm_output)
    for index in range(steps):
        x = make_input(layer.in_features, seed=index, **kwargs)
        ours, theirs = step(layer, x, recipe), step(composed, x, recipe)
        assert len(ours) == len(theirs)
        assert_same(ours, renamed(theirs, ours))


@pytest.mark.covering
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_two_modules(name: str, normalization: str, zero_centered: bool) -> None:
    layer = make_layer(normalization=normalization, zero_centered_gamma=zero_centered)
    compare_composed(layer, RECIPES[name], steps=3)


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_of_the_returned_norm_output_counts(name: str) -> None:
    compare_composed(make_layer(return_layernorm_output=True), RECIPES[name], steps=2)


class WithInput(nn.Module):
    """The input beside the output, as the layer returns it, or as it came."""

    def __init__(self, layer: nc.LayerNormLinear, by_the_layer: bool = True) -> None:
        super().__init__()
        self.layer, self.by_the_layer = layer, by_the_layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.by_the_layer:
            return self.layer(x, return_input=True)
        out = self.layer(x)
        return (*out, x) if isinstance(out, tuple) else (out, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_gradient_of_the_returned_input_is_added(name: str, dtype: torch.dtype) -> None:
    """By the norm's backward: it is rounded once instead of twice."""
    layer = make_layer(params_dtype=dtype, return_layernorm_output=name in ("delayed", "mxfp8"))
    x = make_input(K, dtype=dtype)
    ours = step(WithInput(layer), x, RECIPES[name])
    layer.reset_delayed_scaling()
    theirs = step(WithInput(layer, by_the_layer=False), x, RECIPES[name])
    if dtype == torch.bfloat16:
        assert_close(ours.pop("d input"), theirs.pop("d input"), "bf16_output")
    assert_same(ours, theirs)


def test_returned_input_compiled() -> None:
    compare_compiled(WithInput(make_layer(return_layernorm_output=True)), K, RECIPES["delayed"], steps=1)


def test_returned_input_keeps_its_dtype() -> None:
    layer, x = make_layer(params_dtype=torch.float32), make_input(K, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out, same = layer(x, return_input=True)
    assert out.dtype == torch.bfloat16 and same is x


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", kinds(["current", "mxfp8", "block", "nvfp4"]))
def test_backward_override(kind: str, override: str) -> None:
    recipe = dataclasses.replace(RECIPES[kind], backward_override=override)  # type: ignore[type-var]
    compare_composed(make_layer(), recipe)


def test_is_torchs_layer_in_high_precision() -> None:
    layer, x = make_layer(params_dtype=torch.float32), make_input(K, dtype=torch.float32)
    normalized = F.layer_norm(x, (K,), layer.layer_norm_weight, layer.layer_norm_bias)
    assert_close(layer(x), F.linear(normalized, layer.weight, layer.bias), "fp32_sum_order")


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_the_norm_output_under_inductor() -> None:
    compare_compiled(make_layer(return_layernorm_output=True), K, RECIPES["delayed"], backend="inductor")


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_compiled_with_everything_returned(name: str) -> None:
    options = {"return_layernorm_output": True, "return_bias": True, "normalization": "RMSNorm"}
    compare_compiled(make_layer(**options), K, RECIPES[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
@pytest.mark.parametrize(
    "frozen", ["weight", "input", "weight+bias", "layer_norm_weight+layer_norm_bias+input"]
)
def test_frozen(name: str, frozen: str) -> None:
    layer, x = make_layer(), make_input(K)
    everything = step(copy.deepcopy(layer), x, RECIPES[name])
    for part in frozen.split("+"):
        if part == "input":
            x = x.detach()
        else:
            getattr(layer, part).requires_grad_(False)
    results = step(layer, x, RECIPES[name])
    assert {f"d {part}" for part in frozen.split("+")} == everything.keys() - results.keys()
    if name != "nvfp4":  # stochastic rounding draws other bits when fewer operands are made
        assert_same(results, {key: everything[key] for key in results})


@pytest.mark.parametrize("name", RECIPES)
def test_retain_graph(name: str) -> None:
    check_retained_graph(make_layer(), make_input(K), RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_no_grad(name: str) -> None:
    check_no_grad(make_layer(), make_input(K), RECIPES[name])


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_parameters(name: str) -> None:
    with nc.quantized_model_init(recipe=RECIPES[name]):
        layer = make_layer()
    assert isinstance(layer.weight, nc.QuantizedTensor)
    assert not isinstance(layer.layer_norm_weight, nc.QuantizedTensor)
    other = RECIPES["mxfp8" if name != "mxfp8" and name != "custom" else "block"]
    with nc.autocast(recipe=other), pytest.raises(RuntimeError, match="quantized_model_init"):
        layer(make_input(K))


# -- what runs and what is kept ----------------------------------------------------------------------------------------


class Spy(TorchDispatchMode):
    """Names of the library's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "narrowcast":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", QUANTIZED)
def test_norm_and_quantize_are_one_operator(name: str) -> None:
    layer, x = make_layer(), make_input(K)
    with Spy() as spy, nc.autocast(recipe=RECIPES[name]):
        layer(x)
    assert "norm" not in spy.seen
    assert len([op for op in spy.seen if op.startswith("norm_quantize")]) == 1


def test_frozen_weight_runs_no_wgrad() -> None:
    layer, x = make_layer(), make_input(K)
    layer.weight.requires_grad_(False)
    with nc.autocast(recipe=RECIPES["current"]):
        y = layer(x)
    with Spy() as spy:
        y.float().sum().backward()
    assert spy.seen.count("gemm") == 1


@pytest.mark.parametrize("name", QUANTIZED)
def test_saves_the_input_and_one_byte_per_element_of_the_norm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    layer, x = make_layer(256, 128), make_input(256, 128)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), nc.autocast(recipe=RECIPES[name]):
        layer(x)
    wide = [t for t in saved if t.dtype == torch.bfloat16]
    parameters = {layer.layer_norm_weight.data_ptr(), layer.weight.data_ptr()}
    assert {t.data_ptr() for t in wide} == {x.data_ptr(), *parameters}
    payload = sum(t.numel() * t.element_size() for t in saved) - sum(2 * t.numel() for t in wide)
    assert payload <= 0.6 * 2 * x.numel()


# -- state and errors --------------------------------------------------------------------------------------------------


def test_parameter_names() -> None:
    plain = ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert list(make_layer().state_dict()) == plain
    assert list(make_layer(normalization="RMSNorm", bias=False).state_dict()) == [
        "layer_norm_weight",
        "weight",
    ]
    with nc.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = make_layer()
    assert {key: type(value) for key, value in layer.state_dict().items()} == dict.fromkeys(plain, Tensor)


def test_state_dict_of_delayed_scaling_continues() -> None:
    layer, recipe = make_layer(), RECIPES["delayed"]
    for seed in range(3):
        step(layer, make_input(K, seed=seed), recipe)
    other = make_layer()
    other.load_state_dict(layer.state_dict())
    x = make_input(K, seed=9)
    assert_same(step(other, x, recipe), step(layer, x, recipe))


def test_meta_device() -> None:
    layer = nc.LayerNormLinear(K, N, device="meta", params_dtype=torch.bfloat16, zero_centered_gamma=True)
    with pytest.raises(RuntimeError, match="reset_parameters"):
        layer(make_input(K))
    layer.reset_parameters()
    assert layer.layer_norm_weight.is_meta
    layer.to_empty(device=DEVICE).reset_parameters()
    assert layer.layer_norm_weight.device.type == DEVICE and not layer.layer_norm_weight.any()
    step(layer, make_input(K), RECIPES["delayed"])


def test_initial_values() -> None:
    layer = nc.LayerNormLinear(K, N, device=DEVICE, init_method=nn.init.ones_)
    assert (layer.weight == 1).all() and (layer.layer_norm_weight == 1).all()
    assert not layer.bias.any() and not layer.layer_norm_bias.any()


def test_return_bias() -> None:
    layer = make_layer(return_bias=True)
    with nc.autocast(recipe=RECIPES["current"]):
        out, bias = layer(make_input(K))
        assert bias is layer.bias
        layer.return_bias = False
        assert not torch.equal(out, layer(make_input(K)))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"normalization": "BatchNorm"}, "BatchNorm.*'LayerNorm' or 'RMSNorm'"),
        ({"return_layernorm_output_gathered": True}, "sequence_parallel"),
        ({"in_features": 0}, "in_features is 0"),
        ({"out_features": -1}, "out_features is -1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_constructor_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.LayerNormLinear(**{"in_features": K, "out_features": N, "device": DEVICE, **kwargs})


def test_forward_refuses() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="in_features=48"):
        layer(make_input(K + 1))
    layer.layer_norm_weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match=r"^the norm's weight.*\(48,\)"):
        layer(make_input(K))
    with pytest.raises(TypeError, match="torch.autocast"):
        layer(make_input(K, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="meta"):
        layer(torch.empty(4, K, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("kind", [nc.LayerNorm, nc.RMSNorm])
def test_norm_modules(kind: Any) -> None:
    x = make_input(K, 3, 5, dtype=torch.float32)
    norm = randomized(kind(K, device=DEVICE))
    functional = F.layer_norm if kind is nc.LayerNorm else F.rms_norm
    arguments = (norm.weight, norm.bias) if kind is nc.LayerNorm else (norm.weight,)
    expected = functional(x, (K,), *arguments, eps=1e-5)
    ours = step(norm, x, None)
    assert_close(ours["out0"], expected.detach(), "fp32_sum_order")
    grads = torch.autograd.grad(expected.square().sum(), [*norm.parameters(), x])
    for name, grad in zip([*dict(norm.named_parameters()), "input"], grads):
        assert_close(ours[f"d {name}"], grad, "fp32_sum_order")
    compare_compiled(randomized(kind(K, device=DEVICE, dtype=torch.bfloat16)), K, None)
    with pytest.raises(ValueError, match="last dim"):
        norm(make_input(K + 1))
    with pytest.raises(ValueError, match="normalized_shape"):
        kind((4, 5))
