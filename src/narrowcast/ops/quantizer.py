"""A quantizer with the state it needs: what neighbouring operations ask each other for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..quantizers import QuantizerHandle, quantize_operand
from ..tensors import QuantizedTensorStorage


@dataclass(frozen=True, slots=True)
class BoundQuantizer:
    """How one operation wants its input, or the gradient of its output, quantized.

    ``handle``: the quantizer, in the directions that will be read. ``scale``, ``amax``: state of delayed scaling, None
    without.
    """

    handle: QuantizerHandle
    scale: Tensor | None = None
    amax: Tensor | None = None

    def quantize(self, x: Tensor) -> QuantizedTensorStorage:
        """Quantize ``x`` (*lead, K), fp32, bf16 or fp16, without gradient.

        Returns:
            a storage of the shape of ``x`` whose buffers are those of its (M, K) matrix of rows.
        """
        return with_shape(quantize_operand(matrix_of(x), self.handle, self.scale, self.amax), tuple(x.shape))


def matrix_of(x: Tensor) -> Tensor:
    """``x`` (*lead, K) as the matrix (M, K) of its rows."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def with_shape(storage: QuantizedTensorStorage, shape: tuple[int, ...]) -> QuantizedTensorStorage:
    """A storage made of the (M, K) matrix of a tensor's rows, telling the shape of that tensor; changed in place.

    What goes from one operation to the next says its whole shape, so that a consumer finds ``input_.shape`` right
    whether it got a tensor or a storage. What is saved for the backward should not: save ``storage.rowwise_view()`` or
    ``.columnwise_view()``, which leave the shape behind.
    """
    storage._shape = shape
    return storage
