"""Optimizer state stored in fewer bits than it is computed in.

Moments and master weights are fp32 while a step computes. Between steps they are fp32, bf16, fp16 with one fp32 scale
per tensor, or E4M3 codes with such a scale. Of second moments the scaled dtypes keep the root: its range is that of the
first moment, so the two vanish together and their quotient stays bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
SCALED = {torch.float16: torch.finfo(torch.float16), torch.uint8: torch.finfo(E4M3)}


def encode(values: Tensor, dtype: torch.dtype, is_square: bool) -> tuple[Tensor, Tensor | None]:
    """Return values as they are stored, and their scale.

    Args:
        values: fp32.
        dtype: fp32, bf16, fp16, or uint8 for E4M3.
        is_square: they are second moments.

    Returns:
        A tensor of ``dtype``, and the fp32 scale of one element that its values were divided by; None if there is none.
        A second moment that is not zero stays so.
    """
    if dtype not in SCALED:
        return values.to(dtype), None
    values = values.sqrt() if is_square else values
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    scale = torch.where(largest > 0, largest / SCALED[dtype].max, 1.0)
    scaled = values / scale
    if is_square:
        smallest = SCALED[dtype].smallest_normal * SCALED[dtype].eps
        scaled = torch.where(scaled > 0, scaled.clamp(min=smallest), scaled)
    if dtype == torch.uint8:
        return scaled.clamp(-SCALED[dtype].max, SCALED[dtype].max).to(E4M3).view(torch.uint8), scale
    return scaled.to(dtype), scale


def decode(stored: Tensor, scale: Tensor | None, is_square: bool) -> Tensor:
    """Return the fp32 values of what :func:`encode` returned; ``stored`` itself where it is fp32."""
    if scale is None:
        return stored.float()
    codes = stored.view(E4M3) if stored.dtype == torch.uint8 else stored
    values = codes.float() * scale
    return values * values if is_square else values
