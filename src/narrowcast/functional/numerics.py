"""The choice of the numerics for a tensor: Triton kernels on CUDA, the reference elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from .. import kernels, reference


def numerics_for(x: Tensor) -> ModuleType:
    """Return ``narrowcast.kernels`` for CUDA tensors when Triton is there, else ``narrowcast.reference``."""
    return kernels if x.is_cuda and kernels.AVAILABLE else reference


def computed_by(room: str, function: str, like: int = 0) -> Callable[..., Any]:
    """Return the implementation of an operator that is a function of the numerics, with the same arguments.

    Args:
        room, function: where both numerics have it: module and name.
        like: position of the argument, a tensor or a list of them, whose device decides.
    """

    def run(*given: Any) -> Any:
        x = given[like]
        numerics = numerics_for(x if isinstance(x, Tensor) else x[0])
        return getattr(getattr(numerics, room), function)(*given)

    return run
