"""``product``: what a forward multiplies with in high precision."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .._determinism import DETERMINISM
from .batch_invariant import matmul_batch_invariant


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left @ right.T + bias`` as the mode of :func:`narrowcast.set_deterministic` wants it; differentiable.

    Args:
        left: (*lead, K). right: (N, K). bias: (N,) or None; all of one dtype.

    Returns:
        (*lead, N) in that dtype.
    """
    if not DETERMINISM.batch_invariant:
        return F.linear(left, right, bias)
    rows = matmul_batch_invariant(left.reshape(-1, left.shape[-1]), right).to(left.dtype)
    out = rows.view(*left.shape[:-1], right.shape[0])
    return out if bias is None else out + bias
