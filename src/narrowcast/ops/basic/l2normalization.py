"""Normalization to length one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...autograd import NormSettings
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..forms import SavesTensors
from ..handover import ScaledOperand
from ..op import BasicOperation, TensorsToSave
from .inputs import plain_input
from .norm import norm_gradients, normalize


class L2Normalization(SavesTensors, BasicOperation):
    """``y = x / sqrt(sum(x**2) + eps)`` over the last dim, with fp32 statistics; there are no parameters.

    Takes (*lead, K), gives the same shape and dtype, or quantizes the result in the same kernel for the operation
    behind. It runs as the RMS norm it is: with ``eps / K`` in place of eps and ``1 / sqrt(K)`` as every weight.

    Args:
        eps: added to the sum of squares.
        seq_length, micro_batch_size: accepted for scripts that pass them; sizes are read off the input.
    Raises (in forward):
        ValueError: an input without or with an empty last dim. TypeError: one that is not fp32, bf16 or fp16.
    """

    quantizes_output = quantizes_grad_input = True

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = float(eps)
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size

    def extra_repr(self) -> str:
        """Options, as printed by the module."""
        return f"eps={self.eps}"

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, TensorsToSave]:
        x = plain_input(input_)
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError(
                f"input has shape {tuple(x.shape)}; there is nothing to normalize in its last dim"
            )
        weight, settings = _as_rms_norm(x, self.eps)
        return normalize(x, weight, None, settings, next_op_input_quantizer, requires_grad)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[TensorOrQuantized | None, tuple[Tensor | None, ...]]:
        dx, _, _ = norm_gradients(ctx, grad_output, False, ctx.prev_op_grad_output_quantizer)
        return dx, ()


def _as_rms_norm(x: Tensor, eps: float) -> tuple[Tensor, NormSettings]:
    """Weight (K,) in fp32 and settings with which an RMS norm is the normalization to length one."""
    size = x.shape[-1]
    weight = torch.full((size,), 1.0 / math.sqrt(size), dtype=torch.float32, device=x.device)
    return weight, NormSettings("RMSNorm", eps / size, False)
