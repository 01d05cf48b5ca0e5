"""Normalizations: one kernel each way, which quantizes its result on the neighbor's request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._checks import in_range, shape_of
from ...autograd import NormSettings
from ...functional import norm, norm_backward, norm_backward_quantize, norm_quantize
from ...layers import parameter_device
from ...layers.norm import NormParameters
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..contract import TensorsToSave
from ..forward_forms import SavesTensors
from ..handover import ScaledOperand, matrix_of
from ..op import BasicOperation
from .inputs import plain, plain_input


def norm_gradients(
    ctx: OperationContext,
    grad_output: TensorOrQuantized,
    zero_centered_gamma: bool,
    wanted: ScaledOperand | None,
    residual_grad: Tensor | None = None,
) -> tuple[TensorOrQuantized, Tensor, Tensor]:
    """Return (dx as it is ``wanted``, dweight, dbias); ``residual_grad`` is added to dx before it is rounded.

    ``ctx`` holds what the forward of a :class:`Normalization` saved. dbias is empty for RMSNorm.
    """
    x, weight, mean, rstd = ctx.saved_tensors
    assert isinstance(x, Tensor)
    statistics = (weight, mean, rstd, zero_centered_gamma)
    if wanted is None:
        return norm_backward(plain(grad_output), x, *statistics, residual_grad)
    *buffers, dweight, dbias = norm_backward_quantize(
        matrix_of(plain(grad_output)),
        matrix_of(x),
        *statistics,
        None if residual_grad is None else matrix_of(residual_grad),
        wanted.operand.quantizer,
        *wanted.state(x),
    )
    return wanted.assemble(buffers, tuple(x.shape), x.dtype), dweight, dbias


class Normalization(SavesTensors, BasicOperation):
    """Base of the normalizations: one pass over the input, quantized in it on the next operation's request."""

    quantizes_output = quantizes_grad_input = True

    def norm_of(self, x: Tensor) -> tuple[Any, Any, NormSettings]:
        """Return weight, bias and settings with which the kernel normalizes ``x``, which is checked first."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it normalizes")

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        x, wanted = plain_input(input_), next_op_input_quantizer
        weight, bias, settings = self.norm_of(x)
        how = (settings.eps, settings.normalization, settings.zero_centered_gamma)
        if wanted is None:
            output, mean, rstd, _ = norm(x, None, weight, bias, *how)
        else:
            *buffers, mean, rstd, _ = norm_quantize(
                matrix_of(x), None, weight, bias, *how, wanted.operand.quantizer, *wanted.state(x)
            )
            output = wanted.assemble(buffers, tuple(x.shape), x.dtype)
        return output, (x, weight, mean, rstd) if requires_grad else ()


class NormOperation(NormParameters, Normalization):
    """Base of LayerNorm and RMSNorm; a subclass names its normalization.

    Args:
        normalized_shape: size K of the last dim.
        eps: added to the variance.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        dtype: of the parameters; default: torch's default dtype.
        zero_centered_gamma: the weight holds gamma - 1.
        sm_margin: accepted for scripts that pass it; the kernels share the device as it is.
    Raises:
        ValueError: more than one dim, or in forward an input of another last dim.
        TypeError: in forward, an input that is not fp32, bf16 or fp16.
        RuntimeError: in forward, an input on another device, or parameters on the meta device in compiled code; eager
            code makes them.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        BasicOperation.__init__(self)
        options: dict[str, Any] = {
            "zero_centered_gamma": zero_centered_gamma,
            "device": device,
            "dtype": dtype,
        }
        NormParameters.__init__(self, normalized_shape, eps, **options)
        self.sm_margin = sm_margin

    def pre_first_fuser_forward(self) -> None:
        """Make parameters that are still on the meta device."""
        if self.weight.is_meta:
            self.to_empty(device=parameter_device(None))
            self.reset_parameters()

    def norm_of(self, x: Tensor) -> tuple[Any, Any, NormSettings]:
        self.check_input(x)
        return self.weight, self.bias, self.settings

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        wanted = ctx.prev_op_grad_output_quantizer
        dx, dweight, dbias = norm_gradients(ctx, grad_output, self.settings.zero_centered_gamma, wanted)
        return dx, (dweight,) if self.bias is None else (dweight, dbias)


class LayerNorm(NormOperation, values=("settings",)):
    """``y = (x - mean) / sqrt(variance + eps) * gamma + bias`` over the last dim, with fp32 statistics.

    Takes (*lead, K), gives the same shape and dtype, or quantizes the result in the same kernel for the operation
    behind. Arguments and errors are those of :class:`NormOperation`.
    """

    _normalization = "LayerNorm"


class RMSNorm(NormOperation, values=("settings",)):
    """``y = x / sqrt(mean(x**2) + eps) * gamma`` over the last dim, with fp32 statistics; there is no bias.

    Takes (*lead, K), gives the same shape and dtype, or quantizes the result in the same kernel for the operation
    behind. Arguments and errors are those of :class:`NormOperation`.
    """

    _normalization = "RMSNorm"


class _OfHeadsToo(type):
    """The norm of queries and keys in attention counts as an instance: the same arithmetic without a fuser."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or getattr(type(instance), "is_l2_normalization", False)


class L2Normalization(Normalization, metaclass=_OfHeadsToo, values=("eps",)):
    """``y = x / sqrt(sum(x**2) + eps)`` over the last dim, with fp32 statistics; there are no parameters.

    Takes (*lead, K) and returns the same shape and dtype, or quantizes the result in the same kernel for the next
    operation. It runs as an RMS norm, with ``eps / K`` as eps and ``1 / sqrt(K)`` as every weight.

    Args:
        eps: added to the sum of squares.
        seq_length, micro_batch_size: accepted, without effect; sizes are read off the input.

    Errors are raised in forward.

    Raises:
        ValueError: the input has no or an empty last dim.
        TypeError: the input is not fp32, bf16 or fp16.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        in_range("eps", eps, "use a number, at least 0")
        self.eps = float(eps)
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size

    def norm_of(self, x: Tensor) -> tuple[Any, Any, NormSettings]:
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError(f"input has shape {shape_of(x)}; there is nothing to normalize in its last dim")
        size = x.shape[-1]
        weight = torch.full((size,), 1.0 / math.sqrt(size), dtype=torch.float32, device=x.device)
        return weight, None, NormSettings("RMSNorm", self.eps / size, False)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        dx, _, _ = norm_gradients(ctx, grad_output, False, ctx.prev_op_grad_output_quantizer)
        return dx, ()
