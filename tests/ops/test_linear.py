"""``ops.Linear``: the operations of a linear layer, and state dicts in both forms."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check, make_inputs
from recipes import DEVICE, RECIPES
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import ops

from .linear_modules import assert_as_module

K, N, LEAD = 48, 80, (3, 8)


def make_linear(bias: bool = True, **kwargs: Any) -> ops.Linear:
    torch.manual_seed(1)
    layer = ops.Linear(K, N, bias=bias, **{"device": DEVICE, "dtype": torch.bfloat16, **kwargs})
    if bias:
        nn.init.normal_(layer.bias)
    return layer


def make_module(bias: bool = True) -> nc.Linear:
    torch.manual_seed(2)
    module = nc.Linear(K, N, bias=bias, device=DEVICE, params_dtype=torch.bfloat16)
    if bias:
        nn.init.normal_(module.bias)
    return module


def as_operations(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of the module under the names of the operations."""
    names = {"d weight": "d basic_ops.0.weight", "d bias": "d basic_ops.1.bias"}
    return {names.get(name, name): value for name, value in results.items()}


def test_whole_set() -> None:
    check(make_linear, [(40, K)], RECIPES["delayed"])


def test_fuses_with_its_neighbours() -> None:
    sequential = ops.Sequential(make_linear(), ops.AddExtraInput(in_place=True))
    inputs = make_inputs([(*LEAD, K), (*LEAD, N)])
    sequential(*inputs)
    (group,) = sequential.groups()
    assert [type(op).__name__ for op, _ in group._last_fused[1].forward] == ["ForwardLinearBiasAdd"]


def copied(module: nn.Module, source: nn.Module) -> list[str]:
    """Draw the parameters of ``source``, copy them by order; the names of the latter in this order."""
    with torch.no_grad():
        for ours, theirs in zip(module.parameters(), source.parameters(), strict=True):
            nn.init.normal_(theirs, std=0.2)
            ours.copy_(theirs)
    return [name for name, _ in source.named_parameters()]


@pytest.mark.parametrize("name", RECIPES)
def test_behind_a_norm_it_is_the_fused_module(name: str) -> None:
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    ours = ops.Sequential(ops.RMSNorm(K, **options), make_linear())
    module = nc.LayerNormLinear(K, N, normalization="RMSNorm", device=DEVICE, params_dtype=torch.bfloat16)
    compare_with_module(ours, module, name)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_two_with_norm_and_activation_are_the_fused_module(name: str, bias: bool) -> None:
    options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    ours = ops.Sequential(
        ops.RMSNorm(K, **options),
        ops.Linear(K, 2 * N, bias=bias, **options),
        ops.SwiGLU(),
        ops.Linear(N, K, bias=bias, **options),
    )
    module = nc.LayerNormMLP(
        K,
        N,
        bias=bias,
        normalization="RMSNorm",
        activation="swiglu",
        device=DEVICE,
        params_dtype=torch.bfloat16,
    )
    compare_with_module(ours, module, name)


def compare_with_module(ours: ops.Sequential, module: nn.Module, name: str) -> None:
    """Two steps, bit for bit, all gradients."""
    names = dict(zip([name for name, _ in ours.named_parameters()], copied(ours, module), strict=True))
    renamed = {f"d {mine}": f"d {theirs}" for mine, theirs in names.items()}
    for seed in (0, 1):
        inputs = make_inputs([(*LEAD, K)], seed=seed)
        expected = step(module, inputs, RECIPES[name])
        found = step(ours, inputs, RECIPES[name])
        assert_as_module(name, {renamed.get(key, key): value for key, value in found.items()}, expected)


@pytest.mark.inductor
def test_inductor() -> None:
    sequential = ops.Sequential(make_linear(), ops.AddExtraInput(in_place=True))
    inputs = make_inputs([(40, K), (40, N)])
    forward = torch.compile(sequential, fullgraph=True)
    ours, theirs = (step(sequential, inputs, RECIPES["mxfp8"], f) for f in (forward, None))
    for key, expected in theirs.items():
        nc.testing.assert_close(ours[key], expected, "fp8_flips")


# -- parameters ------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_operations() -> None:
    layer = make_linear()
    assert layer.weight is layer.basic_ops[0].weight and layer.bias is layer.basic_ops[1].bias
    assert [name for name, _ in layer.named_parameters()] == ["basic_ops.0.weight", "basic_ops.1.bias"]
    weight, bias = nn.Parameter(torch.ones(N, K, device=DEVICE)), nn.Parameter(torch.ones(N, device=DEVICE))
    layer.weight, layer.bias = weight, bias
    assert layer.weight is layer.basic_ops[0].weight is weight
    assert layer.bias is layer.basic_ops[1].bias is bias
    assert (layer(torch.ones(1, K, device=DEVICE)) == K + 1).all()
    assert "in_features=48, out_features=80, bias=True" in repr(layer)


def test_layer_without_bias() -> None:
    layer = make_linear(bias=False)
    assert layer.bias is None and len(layer.basic_ops) == 1
    with pytest.raises(AttributeError, match="this Linear has weight, no bias"):
        layer.bias = nn.Parameter(torch.zeros(N))
    with pytest.raises(TypeError, match="weight is a Tensor; assign an nn.Parameter"):
        layer.weight = torch.zeros(N, K)


def test_begins_like_the_operations_and_again() -> None:
    layer = make_linear(dtype=torch.float32, device="cpu")
    torch.manual_seed(1)
    expected = nn.Linear(K, N, bias=False).weight
    assert torch.equal(layer.weight, expected)
    torch.manual_seed(1)
    layer.reset_parameters()
    assert torch.equal(layer.weight, expected) and not layer.bias.any()


def test_meta_parameters_are_made_at_the_first_forward() -> None:
    layer = ops.Linear(K, N, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta and layer.bias is not None and layer.bias.is_meta
    layer(*make_inputs([(*LEAD, K)]))
    assert layer.weight.any() and not layer.bias.is_meta


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_a_list_on_the_meta_device_tells_shapes_and_then_trains(name: str) -> None:
    kind: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    layers = ops.Sequential(ops.RMSNorm(K, **kind), ops.Linear(K, N, **kind), ops.SwiGLU())
    grouped = ops.GroupedLinear(2, K, N, **kind)
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        x, splits = torch.empty(64, K, **kind), torch.tensor([24, 40])
        for y, width in ((layers(x), N // 2), (grouped(x, splits), N)):
            assert y.is_meta and y.shape == (64, width)
        assert all(parameter.is_meta for parameter in layers.parameters())
        y = layers(*make_inputs([(*LEAD, K)]))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_quantized_weight(name: str) -> None:
    with nc.quantized_model_init(recipe=RECIPES[name]):
        layer = make_linear()
    assert isinstance(layer.weight, nc.QuantizedTensor)
    module = make_module()
    module.load_state_dict({"weight": layer.weight.dequantize(), "bias": layer.bias.detach()})
    module.weight = nn.Parameter(layer.weight.detach().clone())
    inputs = make_inputs([(*LEAD, K)])
    assert_same(step(layer, inputs, RECIPES[name]), as_operations(step(module, inputs, RECIPES[name])))


def test_main_grad() -> None:
    layer, inputs = make_linear(accumulate_into_main_grad=True), make_inputs([(*LEAD, K)])
    layer.weight.main_grad = torch.zeros(N, K, device=DEVICE)
    with nc.autocast(recipe=RECIPES["current"]):
        layer(*inputs).float().square().sum().backward()
    assert layer.weight.grad is None and layer.weight.main_grad.any() and layer.bias.grad is not None


# -- state dicts -----------------------------------------------------------------------------------------------


def test_writes_the_keys_of_the_operations() -> None:
    assert list(make_linear().state_dict()) == ["basic_ops.0.weight", "basic_ops.1.bias"]
    assert list(nn.Sequential(make_linear(bias=False)).state_dict()) == ["0.basic_ops.0.weight"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_reads_both_forms(nested: bool, bias: bool) -> None:
    module, source = make_module(bias), make_linear(bias)
    for state, weight in ((module.state_dict(), module.weight), (source.state_dict(), source.weight)):
        target = make_linear(bias)
        nn.init.zeros_(target.weight)
        outer: nn.Module = nn.Sequential(target) if nested else target
        given = OrderedDict((f"0.{key}" if nested else key, value) for key, value in state.items())
        before = list(given)
        assert not any(outer.load_state_dict(given))  # strict: nothing missing, nothing unexpected
        assert torch.equal(target.weight, weight) and list(given) == before


def test_reads_the_scales_of_a_module() -> None:
    module, ours, inputs = make_module(), make_linear(), make_inputs([(*LEAD, K)])
    for _ in range(2):
        step(module, inputs, RECIPES["delayed"])
    state = copy.deepcopy(module.state_dict())
    assert any("scale" in key for key in state)
    ours.load_state_dict(state)
    expected = as_operations(step(module, inputs, RECIPES["delayed"]))
    assert_same(step(ours, inputs, RECIPES["delayed"]), expected)


def test_refuses_what_it_does_not_know() -> None:
    layer = make_linear()
    state = layer.state_dict()
    for extra in ("weight", "gamma"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{extra}"'):
            layer.load_state_dict({**state, extra: torch.zeros(N, K)})
    with pytest.raises(RuntimeError, match=r"Missing key.*basic_ops\.1\.bias"):
        layer.load_state_dict({"weight": torch.zeros(N, K)})


def test_copies_and_pickles() -> None:
    layer, inputs = make_linear(), make_inputs([(*LEAD, K)])
    expected = step(layer, inputs, RECIPES["mxfp8"])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(step(other, inputs, RECIPES["mxfp8"]), expected)


@pytest.mark.parametrize("make", [lambda: nc.ops.Linear(48, 32), lambda: nc.ops.BasicLinear(48, 32)])
@pytest.mark.parametrize("override", [None, "dequantized"])
def test_the_node_shows_what_the_backward_reads(make: Any, override: Any) -> None:
    """As that of :class:`narrowcast.Linear`."""
    op, x = make().to("cpu"), torch.randn(16, 48)
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling(backward_override=override)):
        shown: Any = op(x).grad_fn.backward_objects
    assert shown.backward_override == override and shown.fp8 is True
    assert shown.grad_output_quantizer.dtype == nc.DType.kFloat8E5M2
    assert shown.reduce_and_update_bwd_fp8_tensors is False
    plain: Any = op(x).grad_fn.backward_objects
    assert plain.fp8 is False and plain.grad_output_quantizer is None


def test_the_node_of_operations_without_weights_shows_nothing() -> None:
    out = nc.ops.Sequential(nc.ops.GELU())(torch.randn(4, 8, requires_grad=True))
    assert out.grad_fn.backward_objects is None
