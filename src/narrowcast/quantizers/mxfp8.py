"""MXFP8 quantizer: one E8M0 scale per 32 elements."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..formats import MXFP8_BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, DType, cdiv, round_up
from ..functional import BufferTable, GemmOperand
from ..tensors import MXFP8Tensor, MXFP8TensorStorage
from .quantizer import Quantizer, describe_usage, fp8_dtype_of, matrix_dims


class MXFP8Quantizer(Quantizer):
    """FP8 data with E8M0 scales per 32 elements of a row or column, or per 32x32 tile.

    Args:
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.
        with_2d_quantization: one scale per 32x32 tile, so that both directions hold the same codes.
    """

    dtype: DType
    with_2d_quantization: bool

    _storage_class = MXFP8TensorStorage
    _tensor_class = MXFP8Tensor
    _takes_sources = True
    _minimum_rank = 2
    _compatible_recipe = "MXFP8BlockScaling"

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._freeze(dtype=fp8_dtype_of(fp8_dtype), with_2d_quantization=bool(with_2d_quantization))

    __call__ = Quantizer.quantize

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        rows, columns = matrix_dims(shape)
        row_blocks, column_blocks = cdiv(columns, MXFP8_BLOCK), cdiv(rows, MXFP8_BLOCK)
        kept = MXFP8TensorStorage.buffer_attributes(self.rowwise_usage, self.columnwise_usage)
        buffers: BufferTable = {
            "_rowwise_data": (tuple(shape), torch.uint8),
            "_rowwise_scale_inv": (
                (round_up(rows, SCALE_TILE_ROWS), round_up(row_blocks, SCALE_TILE_COLUMNS)),
                torch.uint8,
            ),
            "_columnwise_data": (tuple(shape), torch.uint8),
            "_columnwise_scale_inv": (
                (round_up(column_blocks, SCALE_TILE_COLUMNS), round_up(columns, SCALE_TILE_ROWS)),
                torch.uint8,
            ),
        }
        return describe_usage(buffers, kept)

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return numerics.mxfp8.quantize(
            x,
            self._element_format(),
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            two_d=self.with_2d_quantization,
        )

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        data, scale_inv = buffers
        decode = numerics.dequantize.mxfp8_columnwise if columnwise else numerics.dequantize.mxfp8_rowwise
        return decode(data, scale_inv, self._element_format(), dtype)

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        # code * 2^e has at most four significant bits: exact in bf16
        decoded = self._decode(numerics, buffers, columnwise, dtype)
        matrix = decoded.reshape(-1, decoded.shape[-1])
        return GemmOperand(matrix.t() if columnwise else matrix, None)
