"""The autograd function of a quantizer's own ``quantize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tensors import plain_gradient


class QuantizeFunction(torch.autograd.Function):
    """Quantization with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Any, dtype: torch.dtype, group: Any) -> Any:
        ctx.dtype = tensor.dtype
        return quantizer._quantize_detached(tensor.detach(), dtype, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return plain_gradient(grad_output).to(ctx.dtype), None, None, None
