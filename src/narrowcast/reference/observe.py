"""Statistics of quantization error."""

from __future__ import annotations

import torch
from torch import Tensor


def loss(x: Tensor, read: Tensor, ceiling: Tensor, beyond: float) -> Tensor:
    """Compare a tensor with what its codes say.

    Args:
        x: (*lead, K), fp32, bf16 or fp16.
        read: its codes, decoded; fp32 of the same shape.
        ceiling: the largest code decoded in its place, likewise.
        beyond: what an element is more than this times its ceiling when it saturates.

    Returns:
        fp32 (6,): how many are not zero, the largest magnitude, the sums of the squares and of the squared errors, how
        many are not zero and read as zero, how many saturate.
    """
    exact = x.float()
    size, error = exact.abs(), exact - read
    counts = [size != 0, (read == 0) & (size != 0), size > ceiling.abs() * beyond]
    nonzero, underflows, saturations = (which.sum().float() for which in counts)
    return torch.stack(
        [nonzero, size.max(), exact.square().sum(), error.square().sum(), underflows, saturations]
    )
