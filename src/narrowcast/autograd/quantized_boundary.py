"""Quantized tensors at the edges of a layer: its output, and the gradient of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import dequantize
from ..quantizers import QuantizerHandle, quantize_operand
from ..tensors import QuantizedTensor
from .arguments import DelayedTensors


class _QuantizeOutput(torch.autograd.Function):
    """Quantization of a layer's output with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Any:
        ctx.dtype = out.dtype
        storage = quantize_operand(out, handle, delayed.scale_fwd, delayed.amax_fwd)
        buffers = [buffer for buffer in storage.get_data_tensors() if buffer is not None]
        return handle.quantizer._assemble(buffers, tuple(out.shape), out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return plain_gradient(grad_output).to(ctx.dtype), None, None


class _QuantizeInputGradient(torch.autograd.Function):
    """The identity, with a quantized gradient."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Tensor:
        ctx.handle, ctx.delayed = handle, delayed
        return inp.view_as(inp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        handle, delayed = ctx.handle, ctx.delayed
        storage = quantize_operand(grad_output, handle, delayed.scale_bwd, delayed.amax_bwd)
        if torch.compiler.is_compiling():  # a compiled graph passes on plain gradients: the quantized values
            operand, shape = storage.rowwise_operand(), list(grad_output.shape)
            return dequantize(operand, storage._quantizer, False, grad_output.dtype, shape), None, None
        buffers = [buffer for buffer in storage.get_data_tensors() if buffer is not None]
        shape = tuple(grad_output.shape)
        return handle.quantizer._assemble(buffers, shape, grad_output.dtype), None, None


def plain_gradient(grad: Tensor) -> Tensor:
    """The gradient in high precision; only eager code ever meets a quantized one."""
    if not torch.compiler.is_compiling() and isinstance(grad, QuantizedTensor):
        return grad.dequantize()
    return grad


def quantize_output(out: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> QuantizedTensor:
    """Output of a layer as a quantized tensor; its gradient passes straight through.

    Args:
        out: (*lead, N). handle: how to quantize it. delayed: state, for a delayed quantizer.
    """
    quantized = _QuantizeOutput.apply(out, handle, delayed)
    if (
        torch.compiler.is_compiling()
    ):  # for the next layer in the graph: it cannot read an object off a graph's tensor
        quantized._quantizer = handle.quantizer
    return quantized


def quantize_input_gradient(inp: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Tensor:
    """``inp``, whose gradient will be quantized: a quantized tensor in eager code, its values in compiled code.

    Args:
        inp: (*lead, K). handle: how to quantize the gradient. delayed: state, for a delayed quantizer.
    """
    return _QuantizeInputGradient.apply(inp, handle, delayed)
