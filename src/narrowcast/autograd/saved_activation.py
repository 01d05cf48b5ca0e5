"""Inputs that norms and activations keep for their backward: the tensors, or E4M3 codes with a scale per 128.

COAT (Xi et al., arXiv:2410.19313, section 5) keeps the inputs of layers without a GEMM in such groups: no tensor core
reads them, so nothing asks for coarser scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import dequantize
from ..quantizers import Float8BlockQuantizer, Operand

CODES = Operand.of(
    Float8BlockQuantizer(
        torch.float8_e4m3fn, rowwise=True, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1
    ),
    columnwise=False,
)


def kept_in_codes(x: Tensor) -> list[Tensor]:
    """Return scales and codes of ``x`` (*lead, K), without gradient: what to save in place of it."""
    codes, scales = CODES.quantize(x).rowwise
    return [scales, codes]


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``kept_in_codes`` kept.

    Args:
        dtype: of the tensor that was kept.
    """
    return dequantize([codes, scales], CODES.quantizer, False, dtype, list(codes.shape))
