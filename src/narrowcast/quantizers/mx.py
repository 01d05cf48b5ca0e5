"""Quantizers of the MX formats: one E8M0 scale per 32 elements of eight, six or four bits."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .._checks import flags
from ..formats import ELEMENT_FORMATS, DType
from ..functional import NativeOperand
from ..tensors import (
    MXFP4Tensor,
    MXFP4TensorStorage,
    MXFP6Tensor,
    MXFP6TensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from .arguments import FP8_ELEMENTS, element_dtype_of
from .codes import codes_as_matrix
from .quantizer import Quantizer


class _MXQuantizer(Quantizer):
    """Base of the MX formats: all but the element format and the storage of its codes."""

    dtype: DType
    with_2d_quantization: bool

    _takes_sources = True

    def __init__(
        self, given: DType | torch.dtype, rowwise: bool, columnwise: bool, with_2d_quantization: bool
    ) -> None:
        argument = f"fp{ELEMENT_FORMATS[self._elements[0]].bits}_dtype"
        element = element_dtype_of(argument, given, *self._elements)
        flags(with_2d_quantization=with_2d_quantization)
        self._freeze(dtype=element, with_2d_quantization=bool(with_2d_quantization))
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    __call__ = Quantizer.quantize

    def _spans_rows(self) -> bool:
        return self.with_2d_quantization

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return numerics.mx.quantize(
            x,
            ELEMENT_FORMATS[self.dtype],
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            two_d=self.with_2d_quantization,
        )


class MXFP8Quantizer(_MXQuantizer):
    """FP8 data with E8M0 scales per 32 elements of a row or column, or per 32x32 tile.

    Args:
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.
        with_2d_quantization: one scale per 32x32 tile, so that both directions hold the same codes.
    Raises:
        ValueError: another element format.
    """

    _storage_class = MXFP8TensorStorage
    _tensor_class = MXFP8Tensor
    _elements = FP8_ELEMENTS

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(fp8_dtype, rowwise, columnwise, with_2d_quantization)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand:
        data, scale_inv = buffers
        # column-wise data keeps the logical orientation: the operand is its transpose, as that of its scales
        codes = codes_as_matrix(data, ELEMENT_FORMATS[self.dtype], columnwise=False)
        if columnwise:
            codes, scale_inv = codes.t(), scale_inv.t()
        return NativeOperand(codes, scale_inv, self._format_layout().native)


class MXFP6Quantizer(_MXQuantizer):
    """Six-bit data, four codes in three bytes, with E8M0 scales per 32 elements or per 32x32 tile.

    Args:
        fp6_dtype: E2M3 (three mantissa bits, values 0.125 to 7.5) or E3M2 (two, 0.0625 to 28).
        rowwise, columnwise: directions to produce.
        with_2d_quantization: one scale per 32x32 tile, so that both directions hold the same codes.
    Raises:
        ValueError: another element format.
    """

    _storage_class = MXFP6TensorStorage
    _tensor_class = MXFP6Tensor
    _elements = (DType.kFloat6E2M3, DType.kFloat6E3M2)

    def __init__(
        self,
        fp6_dtype: DType = DType.kFloat6E2M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(fp6_dtype, rowwise, columnwise, with_2d_quantization)


class MXFP4Quantizer(_MXQuantizer):
    """E2M1 data, two codes per byte, with E8M0 scales per 32 elements or per 32x32 tile.

    Args:
        fp4_dtype: E2M1.
        rowwise, columnwise: directions to produce.
        with_2d_quantization: one scale per 32x32 tile, so that both directions hold the same codes.
    Raises:
        ValueError: another element format.
    """

    _storage_class = MXFP4TensorStorage
    _tensor_class = MXFP4Tensor
    _elements = (DType.kFloat4E2M1,)

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(fp4_dtype, rowwise, columnwise, with_2d_quantization)
