"""Operands of GEMMs: values times scales are what decoding gives, the contraction runs along the last dim."""

from __future__ import annotations

import pytest
import torch
from reference.checks import normal

from narrowcast import reference

from .catalog import VARIANTS, quantize

# Rotated data stays rotated in a product, and scales that are no powers of two are decoded in fp32 alone.
NAMES = [
    name for name in VARIANTS if name not in ("nvfp4 rht", "nvfp4 rht without signs", "nvfp4 stochastic")
]
IN_FP32 = ("block fp32 scales", "rows", "groups")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", NAMES)
def test_emulated_operands_are_the_decoded_matrix(name: str, columnwise: bool, dtype: torch.dtype) -> None:
    quantizer = VARIANTS[name].with_usage(rowwise=not columnwise, columnwise=columnwise)
    tensor = quantize(quantizer, normal((2, 17, 50), torch.bfloat16))
    buffers = tensor.columnwise_operand() if columnwise else tensor.rowwise_operand()
    operand = quantizer._gemm_operand(reference, buffers, columnwise, dtype)
    matrix = tensor.dequantize(dtype=torch.float32).view(34, 50)
    matrix = matrix.t() if columnwise else matrix
    values = operand.values.float()[: matrix.shape[0], : matrix.shape[1]]
    torch.testing.assert_close(values * (1.0 if operand.scale is None else operand.scale), matrix)
    assert not operand.values.float()[:, matrix.shape[1] :].any()
    if name.startswith("identity"):
        expected = torch.float32 if dtype == torch.float32 else buffers[0].dtype
    else:
        expected = torch.float32 if name in IN_FP32 else dtype
    assert operand.values.dtype == expected


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["current", "mxfp8", "block 1d", "block", "identity"])
def test_native_operands_are_the_decoded_matrix(name: str, columnwise: bool) -> None:
    quantizer = VARIANTS[name].with_usage(rowwise=not columnwise, columnwise=columnwise)
    tensor = quantize(quantizer, normal((2, 130, 150), torch.bfloat16))
    buffers = tensor.columnwise_operand() if columnwise else tensor.rowwise_operand()
    operand = quantizer._native_operand(buffers, columnwise)
    matrix = tensor.dequantize(dtype=torch.float32).view(260, 150)
    matrix = matrix.t() if columnwise else matrix
    assert operand is not None and operand.data.shape == matrix.shape
    factors = operand.scale
    if operand.scaling == "1x32":
        factors = torch.exp2(factors.float() - 127).repeat_interleave(32, 1)
    elif operand.scaling == "1x128":
        factors = factors.repeat_interleave(128, 1)
    elif operand.scaling == "128x128":
        factors = factors.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    if factors.dim() == 2:
        factors = factors[: matrix.shape[0], : matrix.shape[1]]
    assert torch.equal(operand.data.float() * factors, matrix)
