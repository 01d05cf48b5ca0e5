"""``Reshape``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..forms import SavesTensors
from ..op import BasicOperation


class Reshape(SavesTensors, BasicOperation):
    """y = x.reshape(shape).

    Args:
        shape: the new shape, with at most one -1.
    Raises:
        ValueError: more than one -1, or sizes below -1. In forward RuntimeError: the input has another number of
        elements.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ValueError(f"shape is {self.shape}; use sizes, and at most one -1")

    def extra_repr(self) -> str:
        """The shape, as printed by the module."""
        return f"shape={self.shape}"

    def op_forward_compute(self, input_: Any, *, requires_grad: bool, **kwargs: Any) -> Any:
        # a tensor of the input's shape and without its memory: sizes may not be kept on the context
        shape = (input_.new_empty(()).expand_as(input_),) if requires_grad else ()
        return input_.reshape(self.shape), shape

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (shape,) = ctx.saved_tensors
        return grad_output.reshape(shape.shape), ()
