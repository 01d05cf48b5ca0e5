"""Quantized tensors at the edges of a layer: values as the quantizer gives them, gradients straight through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.autograd import DelayedScales, quantize_input_gradient, quantize_output
from narrowcast.quantizers import Operand
from narrowcast.tensors import QuantizedTensor

QUANTIZER = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
OPERAND = Operand.of(QUANTIZER)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 96, requires_grad=True), torch.randn(64, 96)


def quantized(x: torch.Tensor) -> Any:
    return QUANTIZER.quantize(x).dequantize()


def test_the_output_is_quantized_and_its_gradient_is_not() -> None:
    x, grad = inputs()
    y = quantize_output(x, OPERAND, DelayedScales())
    assert isinstance(y, QuantizedTensor)
    assert torch.equal(y.dequantize(), quantized(x.detach()))
    y.backward(grad)
    assert torch.equal(x.grad, grad)  # type: ignore[arg-type]


def test_a_quantized_gradient_of_the_output_is_decoded() -> None:
    x, grad = inputs()
    quantize_output(x, OPERAND, DelayedScales()).backward(QUANTIZER.quantize(grad))
    assert type(x.grad) is torch.Tensor and torch.equal(x.grad, quantized(grad))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_the_input_is_quantized_and_the_input_is_not(compiled: bool) -> None:
    x, grad = inputs()

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantize_input_gradient(x, OPERAND, DelayedScales()) * 1

    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    y = run(x)
    assert torch.equal(y, x)
    (given,) = torch.autograd.grad(y, x, grad)
    assert isinstance(given, QuantizedTensor) is not compiled
    assert torch.equal(given.dequantize() if isinstance(given, QuantizedTensor) else given, quantized(grad))


def test_no_second_derivative() -> None:
    x, grad = inputs()
    y = quantize_output(x, OPERAND, DelayedScales())
    (first,) = torch.autograd.grad(y, x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        first.sum().backward()
