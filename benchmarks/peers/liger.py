"""Liger's Triton kernels for SwiGLU and RMSNorm, where it is installed; what they write is quantized afterwards."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

fused_add_rms_norm: Any = None
rms_norm: Any = None
swiglu: Any = None
with contextlib.suppress(ImportError):
    from liger_kernel.ops import fused_add_rms_norm, rms_norm, swiglu

AVAILABLE = swiglu is not None
_CASTING = "llama"


def swiglu_forward(x: Tensor) -> Tensor:
    """``silu(a) * b`` of the two halves of ``x``."""
    return swiglu.swiglu_fused_gate_up_forward(x)[1]


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradients of the two halves, side by side."""
    return swiglu.swiglu_fused_gate_up_backward(x, grad)


def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every row."""
    return rms_norm.rms_norm_forward(x, weight, eps, 0.0, _CASTING, None)[0]


def add_rmsnorm_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of the sum, and the sum."""
    return fused_add_rms_norm.fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, _CASTING)[:2]
