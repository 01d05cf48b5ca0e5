"""``Identity``."""

from __future__ import annotations

from typing import Any

from ..forms import SavesTensors
from ..op import BasicOperation


class Identity(SavesTensors, BasicOperation):
    """y = x."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_, ()

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output, ()
