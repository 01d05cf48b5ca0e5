"""Identity quantizer: keeps a tensor in high precision, for recipes that leave an operand alone."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..functional import BufferTable, GemmOperand, NativeOperand
from ..tensors import IdentityTensor, IdentityTensorStorage
from .quantizer import Quantizer

_HIGH_PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class IdentityQuantizer(Quantizer):
    """A quantizer that keeps values, and casts to ``dtype`` if one is given.

    Args:
        dtype: torch.float32, torch.bfloat16 or torch.float16; None keeps bfloat16 inputs and casts nothing.
        rowwise, columnwise: directions to produce; both are the same buffer.
    Raises:
        ValueError: another dtype.
    """

    hp_dtype: str

    _storage_class = IdentityTensorStorage
    _tensor_class = IdentityTensor
    _layout_fields = ()

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._freeze(hp_dtype=name)
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check_fields()

    __call__ = Quantizer.quantize

    def _check_fields(self) -> None:
        if self.hp_dtype and self.hp_dtype not in _HIGH_PRECISION:
            raise ValueError(
                f"dtype is torch.{self.hp_dtype}; IdentityQuantizer casts to one of {sorted(_HIGH_PRECISION)}"
            )

    def _kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _HIGH_PRECISION[self.hp_dtype] if self.hp_dtype else dtype

    def _keeping(self, dtype: torch.dtype) -> Quantizer:
        return self if self.hp_dtype else self.replace(hp_dtype=str(dtype).removeprefix("torch."))

    def _of_groups(self, columnwise: bool) -> tuple[Quantizer, str] | None:
        return self.with_usage(rowwise=not columnwise, columnwise=columnwise), "padded"

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        return super()._describe_buffers(shape, self._kept_dtype(dtype))

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        # a copy: an operator's output must not alias its input
        return [x.to(self._kept_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format)]

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        return buffers[0].to(dtype, copy=True)

    def _matrix(self, buffers: list[Tensor], columnwise: bool) -> Tensor:
        matrix = buffers[0].reshape(-1, buffers[0].shape[-1])
        return matrix.t() if columnwise else matrix

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        matrix = self._matrix(buffers, columnwise)
        return GemmOperand(matrix.float() if dtype == torch.float32 else matrix, None)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        matrix = self._matrix(buffers, columnwise)
        return NativeOperand(matrix, matrix.new_ones(1, dtype=torch.float32), "plain")
