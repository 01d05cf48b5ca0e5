"""Inputs that norms and activations keep for their backward: the tensors, or E4M3 codes with a scale per 128.

COAT (Xi et al., arXiv:2410.19313, section 5) keeps the inputs of layers without a GEMM in such groups: no tensor core
reads them, so nothing asks for coarser scales.
"""

from __future__ import annotations

from typing import Any

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


def kept_for_backward(x: Tensor, in_codes: bool) -> list[Tensor]:
    """Return what to save of ``x`` (*lead, K), without gradient: itself, or scales and codes.

    ``pop_kept`` returns it, or what the codes decode to.
    """
    if not in_codes:
        return [x]
    codes, scales = CODES.quantize(x).rowwise
    return [scales, codes]


def pop_kept(saved: list[Any], dtype: torch.dtype) -> Any:
    """Return the tensor that the list has last, as ``kept_for_backward`` saved it; the list loses it.

    Args:
        dtype: of the tensor.
    """
    kept = saved.pop()
    if kept is None or kept.dtype != torch.uint8:
        return kept
    return dequantize([kept, saved.pop()], CODES.quantizer, False, dtype, list(kept.shape))
