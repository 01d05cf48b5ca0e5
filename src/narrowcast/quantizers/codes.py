"""Codes as the matrices that GEMMs read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import ElementFormat


def codes_as_matrix(codes: Tensor, element: ElementFormat, columnwise: bool) -> Tensor:
    """Return FP8 codes, uint8, as a matrix (rows, contraction) of their dtype; column-wise data is stored transposed
    already.

    Args:
        codes: (*lead, K), or (K, *lead) for column-wise data.
    """
    data = codes.view(getattr(torch, str(element.torch_dtype)))
    if data.dim() == 2:
        return data
    return data.reshape(data.shape[0], -1) if columnwise else data.reshape(-1, data.shape[-1])
