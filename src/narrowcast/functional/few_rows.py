"""``narrowcast::gemm_few_rows``: fprop of a few rows, quantized on their way into the GEMM.

A linear layer that decodes reads its weight from memory and little else. A GPU that multiplies the pair of formats
natively has one kernel that quantizes the rows and multiplies them. Everything else is :func:`quantize_operand` and
:func:`gemm`, whose codes and scales are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _device, kernels
from ._library import QUANTIZER, always, define
from .gemm import gemm
from .quantize import quantize_operand
from .quantizer_value import QuantizerValue


def _gemm_few_rows(
    left: Tensor,
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    bias: Tensor | None,
    dtype: torch.dtype,
    columns: int,
    scale: Tensor | None,
    fast_accumulation: bool,
) -> Tensor:
    rows = left.shape[0]
    if left.is_cuda:
        out = _in_one_kernel(left, left_quantizer, right, right_quantizer, bias, dtype, columns, scale)
        if out is not None:
            return out
    operand = quantize_operand(left, left_quantizer, None, scale, None)
    given = operand, left_quantizer, right, right_quantizer, bias, dtype, rows, columns
    return gemm("fprop", *given, fast_accumulation, False)


def _in_one_kernel(
    left: Tensor,
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    bias: Tensor | None,
    dtype: torch.dtype,
    columns: int,
    scale: Tensor | None,
) -> Tensor | None:
    """Return the product, or None if no kernel computes it."""
    rule, weight = left_quantizer._prologue(), right_quantizer._native_operand(right, False)
    if rule is None or weight is None or left.shape[0] > rule.rows or not left.numel() * columns:
        return None
    # ptxas 12.8 (Triton 3.6) leaves half of a register unwritten where it knows that two pairs of codes are of zeros.
    # It knows it of columns beyond a single one, for Triton makes a size of 1 a constant. What is left may be NaN.
    if left.shape[1] == 1:
        return None
    if weight.data.dtype != torch.float8_e4m3fn or (rule.scaling, weight.scaling) not in _PAIRS:
        return None
    if not (kernels.AVAILABLE and _device.is_fp8_available()):
        return None
    return kernels.few_rows.matmul(  # type: ignore[attr-defined,no-any-return]
        left,
        weight.data.view(torch.uint8),
        weight.scale,
        bias,
        dtype,
        scaling=rule.scaling,
        scale=scale,
        slot=rule.slot,
        power_2=rule.power_2,
        epsilon=rule.epsilon,
        unseen=rule.unseen,
    )


_PAIRS = (("current", "tensor"), ("given", "tensor"), ("1x128", "128x128"))

gemm_few_rows = define(
    f"gemm_few_rows(Tensor left, {QUANTIZER} left_quantizer, Tensor[] right, {QUANTIZER} right_quantizer, "
    "Tensor? bias, ScalarType dtype, SymInt columns, Tensor? scale, bool fast_accumulation) -> Tensor",
    _gemm_few_rows,
    lambda left, *arguments: left.new_empty((left.shape[0], arguments[5]), dtype=arguments[4]),
    lowered=always,
)
"""Multiply a matrix that is quantized for this product alone with a quantized weight.

Args:
    left: (rows, K), fp32, bf16 or fp16.
    left_quantizer: neither stochastic nor with an amax to collect.
    right: the row-wise buffers of the weight (columns, K).
    bias, dtype, fast_accumulation: as :data:`gemm` takes them.
    scale: the scales of delayed scaling, fp32 (n,).

Returns:
    (rows, columns) of ``dtype``, contiguous.

Numerics:
    Codes and scales are those of :data:`quantize`; then ``RN_dtype(left @ right.T + RN_dtype(bias))``, product and sum
    in fp32.
"""
