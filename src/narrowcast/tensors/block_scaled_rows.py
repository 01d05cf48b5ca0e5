"""Rows of FP8 codes with scales per block of a row: what travels between processes, as tensors and as their parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..formats import FLOAT8_BLOCK_1D, MXFP8, DType
from .quantized_tensor import QuantizedTensor


def has_coded_rows(quantizer: Any) -> bool:
    """Return whether ``reference.block_scaled_rows`` has the format of a quantizer's row-wise data."""
    return quantizer._format_layout() in (FLOAT8_BLOCK_1D, MXFP8) and not quantizer._spans_rows()


def is_coded(x: Any) -> bool:
    """Return whether :func:`coded_rows` takes a tensor."""
    return (
        isinstance(x, QuantizedTensor)
        and x.dim() == 2
        and x.get_usages()["rowwise"]
        and has_coded_rows(x._quantizer)
    )


def coded_rows(x: Any) -> tuple[Tensor, Tensor, bool]:
    """Return codes (R, K), scales, and whether codes are E5M2, as ``reference.block_scaled_rows.rows`` takes them."""
    (codes, scales), quantizer = x.rowwise_operand(), x._quantizer
    rows, transposed = codes.shape[0], quantizer._format_layout() == FLOAT8_BLOCK_1D
    scales = (scales[:, :rows].t() if transposed else scales[:rows]).contiguous()
    return codes, scales, quantizer.dtype == DType.kFloat8E5M2
