"""Operands that come out of a norm or an activation already quantized, in traced or eager code, without gradient.

Each is ``quantize_operand`` of what the producer computes, in one pass over memory where the format allows it, and bit
for bit the same as the two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..functional import (
    act_backward_quantize,
    act_quantize,
    draw_seed,
    norm_backward_quantize,
    norm_quantize,
)
from ..tensors import QuantizedTensorStorage
from .handle import QuantizerHandle


@dataclass(frozen=True)
class NormSettings:
    """How to normalize. ``normalization``: "LayerNorm" or "RMSNorm"; ``zero_centered_gamma``: gamma is weight + 1."""

    normalization: str
    eps: float
    zero_centered_gamma: bool


@dataclass(frozen=True)
class ActivationSettings:
    """Which activation, and the numbers it takes in the order of its record; none of them means its defaults."""

    activation: str
    parameters: tuple[float, ...]


def quantize_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: NormSettings,
    handle: QuantizerHandle,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[QuantizedTensorStorage, Tensor, Tensor]:
    """Quantized norm of ``x``, with the statistics its backward wants.

    Args:
        x: (M, K), fp32, bf16 or fp16.
        weight, bias: (K,); no bias for RMSNorm.
        settings: how to normalize.
        handle: the quantizer to use.
        scale, amax: state tensors of a delayed quantizer; unused by the others.
    Returns:
        (operand, mean, rstd); statistics fp32 (M,), the mean of RMSNorm is empty.
    """
    how = (settings.eps, settings.normalization, settings.zero_centered_gamma)
    seed = draw_seed(x) if handle.stochastic else None
    *buffers, mean, rstd, _ = norm_quantize(x, None, weight, bias, *how, handle.quantizer, seed, scale, amax)
    return handle.assemble(buffers, x.dtype), mean, rstd


def quantize_norm_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centered_gamma: bool,
    residual_grad: Tensor | None,
    handle: QuantizerHandle,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[QuantizedTensorStorage, Tensor, Tensor]:
    """Quantized gradient of a norm with respect to its input, and those of its parameters.

    Args:
        grad: (M, K), gradient of the result.
        x, weight: as given to :func:`quantize_norm`; mean, rstd: as returned by it.
        zero_centered_gamma: gamma is weight + 1.
        residual_grad: (M, K), added before rounding; or None.
        handle: the quantizer to use.
        scale, amax: state tensors of a delayed quantizer; unused by the others.
    Returns:
        (operand (M, K), dweight (K,), dbias (K,)); the bias gradient of RMSNorm is empty.
    """
    inputs = (grad, x, weight, mean, rstd, zero_centered_gamma, residual_grad)
    seed = draw_seed(grad) if handle.stochastic else None
    *buffers, dweight, dbias = norm_backward_quantize(*inputs, handle.quantizer, seed, scale, amax)
    return handle.assemble(buffers, x.dtype), dweight, dbias


def quantize_activation(
    x: Tensor,
    settings: ActivationSettings,
    handle: QuantizerHandle,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> QuantizedTensorStorage:
    """Quantized activation of ``x``.

    Args:
        x: (M, F), or (M, 2F) for a gated activation; fp32, bf16 or fp16.
        settings: which activation.
        handle: the quantizer to use.
        scale, amax: state tensors of a delayed quantizer; unused by the others.
    Returns:
        (M, F) operand.
    """
    name, parameters = settings.activation, list(settings.parameters)
    seed = draw_seed(x) if handle.stochastic else None
    buffers = act_quantize(x, name, handle.quantizer, parameters, seed, scale, amax)
    return handle.assemble(buffers, x.dtype)


def quantize_activation_gradient(
    grad: Tensor,
    x: Tensor,
    settings: ActivationSettings,
    handle: QuantizerHandle,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    column_sums: bool = True,
) -> tuple[QuantizedTensorStorage, Tensor | None]:
    """Quantized gradient of an activation with respect to its input, and that gradient's sum over the rows.

    Args:
        grad: (M, F), gradient of the activation.
        x: (M, F) or (M, 2F), the activation's input.
        settings: which activation.
        handle: the quantizer to use.
        scale, amax: state tensors of a delayed quantizer; unused by the others.
    Returns:
        (operand of the shape of ``x``, fp32 sums (F,) or (2F,), None without ``column_sums``).
    """
    name, parameters = settings.activation, list(settings.parameters)
    seed = draw_seed(grad) if handle.stochastic else None
    made = act_backward_quantize(grad, x, name, handle.quantizer, parameters, column_sums, seed, scale, amax)
    if column_sums:
        return handle.assemble(made[:-1], x.dtype), made[-1]
    return handle.assemble(made, x.dtype), None
