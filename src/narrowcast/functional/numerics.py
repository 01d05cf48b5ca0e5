"""Which implementation of the numerics a tensor takes: Triton kernels on CUDA, the reference elsewhere."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from .. import kernels, reference


def numerics_for(x: Tensor) -> ModuleType:
    """``narrowcast.kernels`` for CUDA tensors when Triton is there, else ``narrowcast.reference``."""
    return kernels if x.is_cuda and kernels.AVAILABLE else reference
