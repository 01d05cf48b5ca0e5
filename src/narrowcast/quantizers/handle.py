"""Handles: what traced code may know about a quantizer.

Inside a traced graph a quantizer is only ever passed to an operator; reading it there is slow to guard, and on some
PyTorch versions an error. A handle carries the few plain facts that the code around the operators needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import draw_seed, quantize, quantize_dbias
from ..tensors import QuantizedTensorStorage
from ..tensors.storage import resolve_storage_class
from .quantizer import Quantizer


@dataclass(frozen=True)
class QuantizerHandle:
    """A quantizer with the facts about it that are needed around operators.

    ``value``: its value as text. ``storage_name``: identifier of its storage class. ``stochastic``: it wants a fresh
    seed. ``delayed``: it wants scale and amax from state.
    """

    quantizer: Quantizer
    value: str
    storage_name: str
    rowwise: bool
    columnwise: bool
    stochastic: bool
    delayed: bool

    def assemble(self, buffers: list[Tensor], dtype: torch.dtype) -> QuantizedTensorStorage:
        """Storage around what the operator returned."""
        # by name: the compiler can make instances of a class it finds in a global, not of one it read off a quantizer
        storage_class = resolve_storage_class(self.storage_name)
        return storage_class.from_buffers(buffers, self.rowwise, self.columnwise, self.quantizer, dtype)


def handle_of(quantizer: Quantizer) -> QuantizerHandle:
    """Handle of a quantizer, in its present usage."""
    return QuantizerHandle(
        quantizer,
        quantizer._value_text(),
        quantizer._storage_name,
        quantizer.rowwise_usage,
        quantizer.columnwise_usage,
        quantizer._is_stochastic(),
        quantizer._is_delayed(),
    )


@dataclass(frozen=True)
class OperandHandles:
    """One quantizer in the three usages a linear layer asks for."""

    both: QuantizerHandle
    rowwise: QuantizerHandle
    columnwise: QuantizerHandle

    @staticmethod
    def of(quantizer: Quantizer) -> OperandHandles:
        """Handles of a quantizer, whatever its present usage."""
        return OperandHandles(
            handle_of(quantizer.with_usage(rowwise=True, columnwise=True)),
            handle_of(quantizer.with_usage(rowwise=True, columnwise=False)),
            handle_of(quantizer.with_usage(rowwise=False, columnwise=True)),
        )


def quantize_operand(
    x: Tensor, handle: QuantizerHandle, scale: Tensor | None = None, amax: Tensor | None = None
) -> QuantizedTensorStorage:
    """Quantize a GEMM operand in traced or eager code, without gradient.

    Args:
        x: (*lead, K), fp32, bf16 or fp16.
        handle: the quantizer to use.
        scale, amax: state tensors of a delayed quantizer; unused by the others.
    """
    seed = draw_seed(x) if handle.stochastic else None
    buffers = quantize(x, handle.quantizer, seed, scale, amax)
    return handle.assemble(buffers, x.dtype)


def quantize_gradient(
    grad: Tensor, handle: QuantizerHandle, scale: Tensor | None = None, amax: Tensor | None = None
) -> tuple[QuantizedTensorStorage, Tensor]:
    """:func:`quantize_operand` with the gradient's sum over all but its last dim from the same read, fp32 (K,)."""
    seed = draw_seed(grad) if handle.stochastic else None
    *buffers, dbias = quantize_dbias(grad, handle.quantizer, seed, scale, amax)
    return handle.assemble(buffers, grad.dtype), dbias
