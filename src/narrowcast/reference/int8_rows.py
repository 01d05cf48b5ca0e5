"""Rows of values as int8 codes with one fp32 scale a row, for tensors that a backward reads once more.

Values of one row that are of one size, such as the channels of a head, lose a fourth of what they lose as E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127.0


def encode(x: Tensor) -> list[Tensor]:
    """Return int8 codes of the shape of ``x`` and scales, fp32 (*lead, 1).

    Args:
        x: (*lead, K), fp32, bf16 or fp16.

    Numerics:
        The scale of a row is its largest magnitude over 127, and a code the value over the scale, in fp32, rounded to
        nearest, ties to even, within 127. Codes are 0 where the scale is 0 or not finite.
    """
    values = x.float().contiguous()
    top = values.abs().amax(-1, keepdim=True) if x.numel() else values.new_zeros((*x.shape[:-1], 1))
    scales = top / torch.full_like(top, LARGEST)  # by a number, a GPU would multiply with the reciprocal
    codes = (values / scales).round().clamp(-LARGEST, LARGEST)
    usable = (scales > 0) & scales.isfinite()
    return [torch.where(usable, codes, 0.0).to(torch.int8), scales]


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times scales in fp32, rounded to ``dtype``: NaN in a row whose scale is not finite."""
    return (codes.float() * scales).to(dtype)
