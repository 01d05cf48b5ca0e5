"""Quantized tensors that neighboring operations pass to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import quantize
from ..quantizers import Operand
from ..tensors import QuantizedTensorStorage


# by identity, as the tensors in it are compared; PyTorch 2.11 hashes what traced code calls before it has its fields
@dataclass(frozen=True, slots=True, eq=False)
class ScaledOperand:
    """An operation's quantizer of its input, or of its output's gradient, with its state.

    Attributes:
        scale: the operation's scale as casts read it, fp32 (n,); None without delayed scaling.
        amax: the operation's amax, fp32 (n,); None without delayed scaling.
    """

    operand: Operand
    scale: Tensor | None = None
    amax: Tensor | None = None

    def quantize(self, x: Tensor) -> QuantizedTensorStorage:
        """Quantize ``x`` (*lead, K), fp32, bf16 or fp16, without gradient.

        Returns:
            a storage of the shape of ``x`` whose buffers are those of its (M, K) matrix of rows.
        """
        rows = matrix_of(x)
        return self.assemble(quantize(rows, self.operand.quantizer, *self.state(x)), tuple(x.shape), x.dtype)

    __call__ = quantize

    def state(self, like: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the seed, the scale, and the amax, in which the arguments of a quantizing operator end."""
        return self.operand.seed(like), self.scale, self.amax

    def assemble(
        self, buffers: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantizedTensorStorage:
        """Return the storage around what a quantizing operator made of the (M, K) matrix of a tensor of this ``shape``.

        It tells the whole shape, so that a consumer finds ``input_.shape`` right whether it got a tensor or a storage.
        """
        storage = self.operand.assemble(buffers, dtype)
        storage._shape = shape
        return storage


def matrix_of(x: Tensor) -> Tensor:
    """Return ``x`` (*lead, K) as the matrix (M, K) of its rows."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
