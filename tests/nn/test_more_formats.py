"""Formats that differ in codecs and layouts alone: what a layer computes from them, eager and compiled, ragged too."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from modules import assert_same, compare_compiled, make_input, step
from recipes import DEVICE, EMULATE, MORE_FORMATS

import narrowcast as nc
from narrowcast import ops
from narrowcast.recipe import linear_plan
from narrowcast.tensors import Float8RowsTensor

each_recipe = pytest.mark.parametrize("name", MORE_FORMATS)


def make_linear(inputs: int = 100, outputs: int = 33, **options: Any) -> nc.Linear:
    torch.manual_seed(1)
    return nc.Linear(inputs, outputs, device=DEVICE, params_dtype=torch.bfloat16, **options)


def decoded(quantizer: nc.Quantizer, x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    usage = {"rowwise": not columnwise, "columnwise": columnwise}
    return quantizer.with_usage(**usage).quantize(x.detach()).dequantize(dtype=torch.float32)


@each_recipe
@pytest.mark.parametrize("tokens", [1, 7, 33, 100])
def test_linear_multiplies_the_decoded_operands(name: str, tokens: int) -> None:
    layer, x, recipe = make_linear(), make_input(100, tokens), MORE_FORMATS[name]
    with nc.autocast(recipe=recipe):
        y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    plan = linear_plan(recipe, "", True, True, module_type="linear")
    inp, weight, grad = (operand.quantizer for operand in (plan.input, plan.weight, plan.grad_output))
    expected = {
        "y": (y, decoded(inp, x, False) @ decoded(weight, layer.weight, False).t() + layer.bias.float()),
        "dx": (dx, decoded(grad, dy, False) @ decoded(weight, layer.weight, True)),
        "dw": (dw, decoded(grad, dy, True).t() @ decoded(inp, x, True)),
        "db": (db, dy.float().sum(0)),
    }
    for what, (ours, theirs) in expected.items():
        bound = 2**-8 * float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.float(), theirs.detach(), rtol=2**-8, atol=bound, msg=what)


@each_recipe
def test_linear_compiled(name: str) -> None:
    compare_compiled(make_linear(), 100, MORE_FORMATS[name])
    compare_compiled(make_linear(), 100, MORE_FORMATS[name], dynamic=True)


@each_recipe
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(name: str, override: str) -> None:
    recipe = dataclasses.replace(MORE_FORMATS[name], backward_override=override)  # type: ignore[type-var]
    compare_compiled(make_linear(), 100, recipe)


@pytest.mark.parametrize("name", ["mxfp6", "mxfp4"])
def test_tiles_of_weights(name: str) -> None:
    recipe = dataclasses.replace(MORE_FORMATS[name], enable_2d_quantization=True)  # type: ignore[type-var]
    layer, x = make_linear(64, 96), make_input(64)
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").weight.quantizer
    rows, columns = (decoded(quantizer, layer.weight, columnwise) for columnwise in (False, True))
    assert torch.equal(rows, columns)
    plain, tiled = step(layer, x, MORE_FORMATS[name]), step(layer, x, recipe)
    assert not torch.equal(plain["out0"], tiled["out0"])


@each_recipe
def test_quantized_weights(name: str) -> None:
    recipe = MORE_FORMATS[name]
    with nc.quantized_model_init(recipe=recipe):
        layer = make_linear()
    kinds = {"mxfp6": nc.MXFP6Tensor, "mxfp4": nc.MXFP4Tensor, "rowwise": Float8RowsTensor}
    assert type(layer.weight) is kinds.get(name, nc.HybridQuantizedTensor)
    assert_same(step(layer, make_input(100), recipe), step(make_linear(), make_input(100), recipe))


@each_recipe
def test_layernorm_mlp(name: str) -> None:
    torch.manual_seed(1)
    module = nc.LayerNormMLP(48, 72, device=DEVICE, params_dtype=torch.bfloat16)
    compare_compiled(module, 48, MORE_FORMATS[name])


@each_recipe
def test_sequential_of_operations(name: str) -> None:
    torch.manual_seed(1)
    module = ops.Sequential(
        ops.Linear(40, 96, device=DEVICE, dtype=torch.bfloat16),
        ops.SwiGLU(),
        ops.Linear(48, 24, device=DEVICE, dtype=torch.bfloat16),
    )
    compare_compiled(module, 40, MORE_FORMATS[name])


@each_recipe
def test_grouped_linear(name: str) -> None:
    torch.manual_seed(1)
    grouped = nc.GroupedLinear(3, 40, 33, device=DEVICE, params_dtype=torch.bfloat16, bias=False)
    splits, x = [7, 0, 33], make_input(40)
    # no grouped GEMM multiplies scales of rows
    recipe = dataclasses.replace(MORE_FORMATS[name], emulate=EMULATE)  # type: ignore[type-var]
    with nc.autocast(recipe=recipe):
        y = grouped(x, splits)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    start = 0
    for index, size in enumerate(splits):
        part = slice(start, start + size)
        start += size
        if not size:
            continue
        single = make_linear(40, 33, bias=False)
        with torch.no_grad():
            single.weight.copy_(getattr(grouped, f"weight{index}"))
        results = step(single, x[part].detach().requires_grad_(True), recipe)
        assert torch.equal(y[part].detach(), results["out0"]) and torch.equal(dx[part], results["d input"])


@pytest.mark.parametrize("name", ["mxfp6", "mxfp4", "rowwise"])
def test_a_hybrid_half(name: str) -> None:
    weight = MORE_FORMATS[name].make_quantizer("weight")
    x = torch.randn(33, 50).bfloat16()
    hybrid = nc.HybridQuantizer(
        rowwise_quantizer=weight,
        columnwise_quantizer=nc.MXFP8Quantizer(nc.DType.kFloat8E4M3),
        columnwise_source="rowwise_dequantized",
    )
    assert torch.equal(hybrid.quantize(x).dequantize(), copy.copy(weight).quantize(x).dequantize())


@pytest.mark.parametrize("choice", ["weights", "activations", "all"])
def test_nvfp4_with_four_over_six_and_stochastic_gradients(choice: str) -> None:
    """Four over six is for the forward; gradients are rounded stochastically beside it."""
    recipe = nc.recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6=choice)
    plan = linear_plan(recipe, "", True, True, module_type="linear")
    assert plan.grad_output.stochastic and not (plan.input.stochastic or plan.weight.stochastic)
    compare_compiled(make_linear(), 100, recipe, steps=1)


@pytest.mark.parametrize("sizes", [(7, 33, 50), (1, 1, 16), (16, 16, 16)], ids=str)
def test_rowwise_scales_each_gemm_along_its_contraction(sizes: tuple[int, int, int]) -> None:
    """The formula of torchao's recipe, written out: a power of two for every row of both operands of each GEMM."""
    tokens, inputs, outputs = sizes
    torch.manual_seed(4)
    layer = nc.Linear(inputs, outputs, bias=False, device="cpu", recipe="rowwise")
    x = (torch.randn(tokens, inputs) * torch.logspace(-3, 2, tokens)[:, None]).requires_grad_()
    dy = torch.randn(tokens, outputs) * torch.logspace(-5, 1, outputs)

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        amax = matrix.detach().double().abs().amax(1, keepdim=True).clamp(min=1e-12)
        scale = torch.exp2(torch.floor(torch.log2(448 / amax))).float()
        return (matrix * scale).to(torch.float8_e4m3fn).float() / scale

    w = layer.weight.detach()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(y, rounded(x) @ rounded(w).t())
    torch.testing.assert_close(x.grad, rounded(dy) @ rounded(w.t()).t())
    torch.testing.assert_close(layer.weight.grad, rounded(dy.t()) @ rounded(x.t()).t())


def test_rowwise_with_gw_hp_keeps_the_gradient_of_the_weight() -> None:
    torch.manual_seed(4)
    layer = nc.Linear(33, 50, bias=False, device="cpu", recipe="rowwise_with_gw_hp")
    x, dy = torch.randn(7, 33), torch.randn(7, 50)
    layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x)
