"""``ConstantScale``."""

from __future__ import annotations

from typing import Any

from ..forms import SavesTensors
from ..op import BasicOperation


class ConstantScale(SavesTensors, BasicOperation):
    """y = scale * x.

    Args:
        scale: a Python number; not trained.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)

    def extra_repr(self) -> str:
        """The factor, as printed by the module."""
        return f"scale={self.scale}"

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_ * self.scale, ()

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output * self.scale, ()
