"""Moving bytes between the two directions of a quantized tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def transposed(data: Tensor) -> Tensor:
    """(*lead, K) -> (K, *lead), in memory of its own: buffers must not alias, also where nothing moves."""
    return data.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
