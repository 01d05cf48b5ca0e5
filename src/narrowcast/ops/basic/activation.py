"""Activations: ``y = f(x)``, and gated ones, ``y = f(a) * b`` for the two halves of the last dim.

All are shells around one kernel each way. The output is quantized by the kernel that computes it when the next
operation requests it, and so is the gradient of the input for the previous operation.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..._checks import flags
from ...autograd import ActivationSettings
from ...formats import DType
from ...functional import act, act_backward, act_backward_quantize, act_quantize, dequantize
from ...functional.activation import output_shape
from ...quantizers import Float8CurrentScalingQuantizer, Operand
from ...tensors import QuantizedTensorStorage, TensorOrQuantized
from ..context import OperationContext
from ..contract import TensorsToSave
from ..forward_forms import SavesTensors
from ..handover import ScaledOperand, matrix_of
from ..op import BasicOperation
from .glu_channels import channels_from_halves, channels_to_halves
from .inputs import plain, plain_input

FOLLOWS_FROM = ("settings", "cache_quantized_input", "glu_interleave_size")

_CACHE = Operand.of(Float8CurrentScalingQuantizer(DType.kFloat8E4M3), True, False)


class ActivationBase(BasicOperation):
    """Base of plain and scaled activations: the formula, and the channel order of the input."""

    quantizes_output = quantizes_grad_input = True

    _activation: ClassVar[str]
    _numbers: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that the activation takes, in its order; none for its defaults."""
    glu_interleave_size: int | None = None
    """Channels per block where gate and linear ones alternate, which the kernels do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = ActivationSettings(
            self._activation, tuple(getattr(self, name) for name in self._numbers)
        )

    @property
    def formula(self) -> tuple[str, list[float]]:
        """Name and numbers of the activation, as the operators take them."""
        return self.settings.activation, list(self.settings.parameters)


class ActivationOperation(SavesTensors, ActivationBase):
    """Base of the activations: (*lead, F), or (*lead, 2F) for a gated one, to (*lead, F) of the same dtype.

    Args:
        cache_quantized_input: keep the input for the backward as E4M3 with one scale instead of as it is; the gradient
            is then that of the rounded input.

    Errors are raised in forward.

    Raises:
        ValueError: an odd last dim of a gated activation.
        TypeError: an input that is not fp32, bf16 or fp16.
    """

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        flags(cache_quantized_input=cache_quantized_input)
        self.cache_quantized_input = bool(cache_quantized_input)

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        given = plain_input(input_)
        x, wanted = channels_to_halves(given, self.glu_interleave_size), next_op_input_quantizer
        name, parameters = self.formula
        if wanted is None:
            output: TensorOrQuantized = act(x, name, parameters)
        else:
            quantizer = wanted.operand.quantizer
            buffers = act_quantize(matrix_of(x), name, quantizer, parameters, *wanted.state(x))
            output = wanted.assemble(buffers, output_shape(x, name), x.dtype)
        if not requires_grad:
            return output, ()
        if not self.cache_quantized_input:
            return output, (given,)
        codes, scale_inv = _CACHE.quantize(matrix_of(given)).rowwise
        # the dtype of the input goes along in a tensor without memory
        return output, (codes, scale_inv, given.new_empty(0))

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        grad, x = plain(grad_output), self.saved_input(ctx, grad_output)
        wanted = ctx.prev_op_grad_output_quantizer
        if wanted is None or self.glu_interleave_size is not None:
            dx = channels_from_halves(act_backward(grad, x, *self.formula), self.glu_interleave_size)
            return dx if wanted is None else wanted.quantize(dx), ()
        return self.quantized_gradient(grad, x, wanted, False)[0], ()

    def quantized_gradient(
        self, grad: Tensor, x: Tensor, wanted: ScaledOperand, column_sums: bool
    ) -> tuple[QuantizedTensorStorage, Tensor | None]:
        """Return the input's gradient as ``wanted``, and its fp32 sums over all but the last dim on request."""
        (name, parameters), quantizer = self.formula, wanted.operand.quantizer
        buffers = act_backward_quantize(
            matrix_of(grad), matrix_of(x), name, quantizer, parameters, column_sums, *wanted.state(grad)
        )
        # by slices: on the way back traced code cannot pop
        quantized, sums = (buffers[:-1], buffers[-1]) if column_sums else (buffers, None)
        return wanted.assemble(quantized, tuple(x.shape), x.dtype), sums

    def saved_input(self, ctx: OperationContext, grad_output: TensorOrQuantized) -> Tensor:
        """Return the input as the kernel takes it, with the leading dims of the gradient."""
        saved: Any = ctx.saved_tensors
        if not self.cache_quantized_input:
            return channels_to_halves(saved[0], self.glu_interleave_size)
        codes, scale_inv, like = saved
        values = dequantize([codes, scale_inv], _CACHE.quantizer, False, like.dtype, list(codes.shape))
        values = values.view(*grad_output.shape[:-1], values.shape[-1])
        return channels_to_halves(values, self.glu_interleave_size)


class GELU(ActivationOperation, values=FOLLOWS_FROM):
    """The tanh approximation ``y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``."""

    _activation = "gelu"


class GEGLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = gelu(a) * b``, with :class:`GELU` applied to the first half ``a`` of the last dim, ``b`` the second."""

    _activation = "geglu"


class GLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = sigmoid(a) * b`` for the halves ``a``, ``b`` of the last dim."""

    _activation = "glu"


class QGELU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = x * sigmoid(1.702 * x)``."""

    _activation = "qgelu"


class QGEGLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = qgelu(a) * b``, with :class:`QGELU` applied to the first half ``a`` of the last dim, ``b`` the second."""

    _activation = "qgeglu"


class ReLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = max(x, 0)``, with the gradient 0 at 0."""

    _activation = "relu"


class ReGLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = max(a, 0) * b`` for the halves ``a``, ``b`` of the last dim."""

    _activation = "reglu"


class SReLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = max(x, 0)**2``."""

    _activation = "srelu"


class SReGLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = max(a, 0)**2 * b`` for the halves ``a``, ``b`` of the last dim."""

    _activation = "sreglu"


class SiLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = x * sigmoid(x)``."""

    _activation = "silu"
