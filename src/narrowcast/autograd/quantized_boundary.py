"""Quantized tensors at the edges of a layer: its output, and the gradient of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import can_return_quantized, in_eager, once_differentiable
from ..functional import dequantize, quantize
from ..quantizers import Operand
from ..tensors import QuantizedTensor, plain_gradient
from .arguments import DelayedScales


class _QuantizeOutput(torch.autograd.Function):
    """Quantization of a layer's output with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, operand: Operand, scales: DelayedScales) -> Any:
        ctx.dtype = out.dtype
        buffers = quantize(out, operand.quantizer, operand.seed(out), scales.scale, scales.amax)
        return operand.quantizer._assemble(buffers, tuple(out.shape), out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return plain_gradient(grad_output).to(ctx.dtype), None, None


class _QuantizeInputGradient(torch.autograd.Function):
    """The identity, with a quantized gradient."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, operand: Operand, scales: DelayedScales) -> Tensor:
        ctx.operand, ctx.amax = operand, scales.amax
        ctx.save_for_backward(scales.scale)
        return inp.view_as(inp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        operand, shape = ctx.operand, tuple(grad_output.shape)
        (scale,) = ctx.saved_tensors
        buffers = quantize(grad_output, operand.quantizer, operand.seed(grad_output), scale, ctx.amax)
        if not can_return_quantized():  # a compiled graph passes on plain gradients: the quantized values
            rowwise = operand.split(buffers).rowwise
            return dequantize(rowwise, operand.quantizer, False, grad_output.dtype, list(shape)), None, None
        return operand.quantizer._assemble(buffers, shape, grad_output.dtype), None, None


def quantize_output(out: Tensor, operand: Operand, scales: DelayedScales) -> QuantizedTensor:
    """Return the output of a layer as a quantized tensor; its gradient passes straight through.

    Args:
        out: (*lead, N).
        operand: how to quantize it.
        scales: state, for a delayed quantizer.
    """
    if not operand.value:
        return in_eager(_QuantizeOutput.apply, out, operand, scales)  # type: ignore[no-any-return]
    quantized = _QuantizeOutput.apply(out, operand, scales)
    # for the next layer in a graph: it cannot read an object off a graph's tensor
    quantized._quantizer = operand.quantizer
    return quantized


def quantize_input_gradient(inp: Tensor, operand: Operand, scales: DelayedScales) -> Tensor:
    """Return ``inp``, whose gradient will be quantized: a quantized tensor in eager code, its values in compiled code.

    Args:
        inp: (*lead, K).
        operand: how to quantize the gradient.
        scales: state, for a delayed quantizer.
    """
    if not operand.value:
        return in_eager(_QuantizeInputGradient.apply, inp, operand, scales)  # type: ignore[no-any-return]
    return _QuantizeInputGradient.apply(inp, operand, scales)
