"""Rows of FP8 codes with scales per block of a row, as they travel between processes."""

import torch
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLOAT8_FORMATS, MX_BLOCK
from .codecs import decode_e8m0, decode_float8
from .reduction import round_to_dtype


def rows(codes: Tensor, scales: Tensor, e5m2: bool, dtype: torch.dtype) -> Tensor:
    """Decode rows.

    Args:
        codes: uint8 (R, K).
        scales: row by row, 128 / block for each 128 elements that are begun: fp32 of blocks of 128, or E8M0 codes of
            blocks of 32.
        e5m2: codes are E5M2, not E4M3.
        dtype: of the values.

    Numerics:
        (R, K): ``RN_dtype(code * scale)``.
    """
    coded = scales.dtype == torch.uint8
    factors = decode_e8m0(scales) if coded else scales
    factors = factors.repeat_interleave(MX_BLOCK if coded else FLOAT8_BLOCK, dim=1)[:, : codes.shape[1]]
    return round_to_dtype(decode_float8(codes, FLOAT8_FORMATS["e5m2" if e5m2 else "e4m3"]) * factors, dtype)


source = rows
