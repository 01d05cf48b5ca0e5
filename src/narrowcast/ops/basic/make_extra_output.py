"""``MakeExtraOutput``."""

from __future__ import annotations

from typing import Any

from ..op import BasicOperation


class MakeExtraOutput(BasicOperation):
    """y = x, and x once more as an extra output: the opening half of a residual connection. The gradients add.

    Args:
        in_place: the sum of the gradients may take the place of that of the extra output, which lets it join the GEMM
            behind. The caller's gradient is never written to.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def extra_repr(self) -> str:
        """The option, as printed by the module."""
        return f"in_place={self.in_place}"

    def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_, [(input_,)], [()]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        (extra,) = basic_op_grad_extra_outputs[0]
        return grad_output if extra is None else grad_output + extra, [()], [()]
