"""``AddExtraInput``."""

from __future__ import annotations

from typing import Any

from ..op import BasicOperation


class AddExtraInput(BasicOperation):
    """y = x + extra, the closing half of a residual connection; both get the gradient of y.

    Args:
        in_place: the sum may take the place of the extra input, which lets it join the GEMM in front. The caller's
            tensor is never written to.
    Raises (in forward):
        ValueError: the two shapes differ.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def extra_repr(self) -> str:
        """The option, as printed by the module."""
        return f"in_place={self.in_place}"

    def fuser_forward_compute(self, input_: Any, *, basic_op_extra_inputs: Any, **kwargs: Any) -> Any:
        (extra,) = basic_op_extra_inputs[0]
        if extra.shape != input_.shape:
            raise ValueError(
                f"the extra input has shape {tuple(extra.shape)}, the input {tuple(input_.shape)}; they must be equal"
            )
        return input_ + extra, [()], [()]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        tensors_to_save: Any,
        *,
        basic_op_extra_inputs: Any,
        **kwargs: Any,
    ) -> None:
        (ctx,) = basic_op_ctxs
        ctx.dtypes = (input_.dtype, basic_op_extra_inputs[0][0].dtype)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        # a fused operation's forward that saves nothing may be in front
        ours, theirs = getattr(basic_op_ctxs[0], "dtypes", (grad_output.dtype, grad_output.dtype))
        return grad_output.to(ours), [()], [(grad_output.to(theirs),)]
