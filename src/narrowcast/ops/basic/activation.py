"""Activations: ``y = f(x)``, and gated ones, ``y = f(a) * b`` for the two halves of the last dim.

All are shells around one kernel each way. The output is quantized by the kernel that computes it when the next
operation asks for that, and so is the gradient of the input for the operation in front.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...formats import DType
from ...functional import act, act_backward, dequantize
from ...functional.activation import output_shape
from ...quantizers import (
    ActivationSettings,
    Float8CurrentScalingQuantizer,
    handle_of,
    quantize_activation,
    quantize_activation_gradient,
    quantize_operand,
)
from ...tensors import QuantizedTensorStorage, TensorOrQuantized
from ..context import OperationContext
from ..op import BasicOperation, TensorsToSave
from ..quantizer import BoundQuantizer, matrix_of, with_shape
from .inputs import plain, plain_input

_CACHE = handle_of(Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False))


class ActivationOperation(BasicOperation):
    """Base of the activations; a subclass names its own.

    Args:
        cache_quantized_input: keep the input for the backward as E4M3 with one scale instead of as it is; the gradient
            is then that of the rounded input.
    Raises (in forward):
        ValueError: an odd last dim of a gated activation. TypeError: an input that is not fp32, bf16 or fp16.
    """

    quantizes_output = quantizes_grad_input = True

    _activation: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = bool(cache_quantized_input)
        self.settings = ActivationSettings(self._activation, self._parameters_in_order())

    def _parameters_in_order(self) -> tuple[float, ...]:
        """The numbers that the activation takes; none for its defaults."""
        return ()

    def extra_repr(self) -> str:
        """Options that are not the default, as printed by the module."""
        return "cache_quantized_input=True" if self.cache_quantized_input else ""

    # Where the channels of a gated activation lie otherwise than in two halves, a subclass moves them.

    def _halves_of(self, x: Tensor) -> Tensor:
        return x

    def _from_halves(self, grad: Tensor) -> Tensor:
        return grad

    @property
    def moves_channels(self) -> bool:
        """Whether the input is rearranged on the way to the kernel, and its gradient on the way back."""
        return False

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        given = plain_input(input_)
        x, wanted = self._halves_of(given), next_op_input_quantizer
        if wanted is None:
            output: TensorOrQuantized = act(x, self.settings.activation, list(self.settings.parameters))
        else:
            made = quantize_activation(matrix_of(x), self.settings, wanted.handle, wanted.scale, wanted.amax)
            output = with_shape(made, output_shape(x, self.settings.activation))
        if not requires_grad:
            return output, ()
        return output, (quantize_operand(matrix_of(given), _CACHE) if self.cache_quantized_input else given,)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: TensorOrQuantized, tensors_to_save: TensorsToSave, **kwargs: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        grad, x = plain(grad_output), self.saved_input(ctx, grad_output)
        wanted = ctx.prev_op_grad_output_quantizer
        if wanted is None or self.moves_channels:
            name, parameters = self.settings.activation, list(self.settings.parameters)
            dx = self._from_halves(act_backward(grad, x, name, parameters))
            return dx if wanted is None else wanted.quantize(dx), ()
        made, _ = quantize_activation_gradient(
            matrix_of(grad), matrix_of(x), self.settings, wanted.handle, wanted.scale, wanted.amax, False
        )
        return with_shape(made, tuple(x.shape)), ()

    def saved_input(self, ctx: OperationContext, grad_output: TensorOrQuantized) -> Tensor:
        """The input as the kernel takes it, with the leading dims of the gradient."""
        (saved,) = ctx.saved_tensors
        if isinstance(saved, QuantizedTensorStorage):
            (data, *rest), quantizer = saved.rowwise_operand(), saved._quantizer
            values = dequantize([data, *rest], quantizer, False, saved.dtype, list(data.shape))
            saved = values.view(*grad_output.shape[:-1], values.shape[-1])
        assert saved is not None
        return self._halves_of(saved)


class GELU(ActivationOperation):
    """The tanh approximation ``y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Takes (*lead, F), gives the same shape and dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "gelu"


class GEGLU(ActivationOperation):
    """``y = gelu(a) * b``, with :class:`GELU` applied to the first half ``a`` of the last dim, ``b`` the second.

    Takes (*lead, 2F), gives (*lead, F) in the same dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "geglu"


class GLU(ActivationOperation):
    """``y = sigmoid(a) * b`` for the halves ``a``, ``b`` of the last dim.

    Takes (*lead, 2F), gives (*lead, F) in the same dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "glu"


class QGELU(ActivationOperation):
    """``y = x * sigmoid(1.702 * x)``.

    Takes (*lead, F), gives the same shape and dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "qgelu"


class QGEGLU(ActivationOperation):
    """``y = qgelu(a) * b``, with :class:`QGELU` applied to the first half ``a`` of the last dim, ``b`` the second.

    Takes (*lead, 2F), gives (*lead, F) in the same dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "qgeglu"


class ReLU(ActivationOperation):
    """``y = max(x, 0)``, with the gradient 0 at 0.

    Takes (*lead, F), gives the same shape and dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "relu"


class ReGLU(ActivationOperation):
    """``y = max(a, 0) * b`` for the halves ``a``, ``b`` of the last dim.

    Takes (*lead, 2F), gives (*lead, F) in the same dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "reglu"


class SReLU(ActivationOperation):
    """``y = max(x, 0)**2``.

    Takes (*lead, F), gives the same shape and dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "srelu"


class SReGLU(ActivationOperation):
    """``y = max(a, 0)**2 * b`` for the halves ``a``, ``b`` of the last dim.

    Takes (*lead, 2F), gives (*lead, F) in the same dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "sreglu"


class SiLU(ActivationOperation):
    """``y = x * sigmoid(x)``.

    Takes (*lead, F), gives the same shape and dtype. Arguments and errors are those of
    :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
    """

    _activation = "silu"
