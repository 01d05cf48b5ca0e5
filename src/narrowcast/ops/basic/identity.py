"""``Identity``."""

from __future__ import annotations

from typing import Any

from ..op import BasicOperation


class Identity(BasicOperation):
    """y = x."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_, ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output, ()
