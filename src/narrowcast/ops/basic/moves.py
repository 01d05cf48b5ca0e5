"""Operations that pass on what they get, and both halves of a residual connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._checks import numbers, shape_of, typed, whole
from ..forward_forms import SavesTensors
from ..op import BasicOperation


class Identity(SavesTensors, BasicOperation, values=()):
    """y = x."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_, ()

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output, ()


class Reshape(SavesTensors, BasicOperation, values=("shape",)):
    """y = x.reshape(shape).

    Args:
        shape: the new shape, with at most one -1.
    Raises:
        ValueError: more than one -1, or sizes below -1.
        RuntimeError: in forward, the input has another number of elements.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"shape is {typed(shape)}; use sizes, such as (-1, 64)")
        for size in shape:
            whole(shape=size)
        self.shape = tuple(shape)
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ValueError(f"shape is {self.shape}; use sizes, and at most one -1")

    def op_forward_compute(self, input_: Any, *, requires_grad: bool, **kwargs: Any) -> Any:
        # a tensor of the input's shape and without its memory: sizes may not be kept on the context
        shape = (input_.new_empty(()).expand_as(input_),) if requires_grad else ()
        return input_.reshape(self.shape), shape

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (shape,) = ctx.saved_tensors
        return grad_output.reshape(shape.shape), ()


class ConstantScale(SavesTensors, BasicOperation, values=("scale",)):
    """y = scale * x.

    Args:
        scale: a Python number; not trained.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        numbers(scale=scale)
        self.scale = float(scale)

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_ * self.scale, ()

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return grad_output * self.scale, ()


def check_extra_input(extra: Tensor, name: str, shape: Sequence[int]) -> None:
    """
    Raises:
        ValueError: the extra input has another shape than what it is added to.
    """
    if tuple(extra.shape) != tuple(shape):
        raise ValueError(
            f"the extra input has shape {shape_of(extra)}, {name} {tuple(shape)}; they must be equal"
        )


class _InPlace(BasicOperation):
    """Base of both halves of a residual connection."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place


class AddExtraInput(_InPlace, values=("in_place",)):
    """y = x + extra, the second half of a residual connection; both get the gradient of y.

    Args:
        in_place: allow the sum to overwrite the extra input, so that it can join the previous GEMM. The caller's tensor
            is never written.

    Errors are raised in forward.

    Raises:
        ValueError: the two shapes differ.
    """

    num_extra_inputs = 1

    def fuser_forward_compute(self, input_: Any, *, basic_op_extra_inputs: Any, **kwargs: Any) -> Any:
        (extra,) = basic_op_extra_inputs[0]
        check_extra_input(extra, "the input", input_.shape)
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


class MakeExtraOutput(_InPlace, values=("in_place",)):
    """y = x, and x again as an extra output: the first half of a residual connection. The gradients add.

    Args:
        in_place: allow the sum of the gradients to overwrite the extra output's, so that it can join the next GEMM. The
            caller's gradient is never written.
    """

    num_extra_outputs = 1

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
