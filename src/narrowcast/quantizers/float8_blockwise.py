"""FP8 block quantizer: fp32 scales per 1x128 block or 128x128 tile."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT, DType, cdiv, round_up
from ..functional import BufferTable, GemmOperand, NativeOperand
from ..tensors import Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
from .quantizer import Quantizer, codes_as_matrix, describe_usage, fp8_dtype_of, matrix_dims


class Float8BlockQuantizer(Quantizer):
    """FP8 data with one fp32 scale per block of 128.

    Args:
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.
        amax_epsilon: lower bound of a block's amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for 1x128 blocks, 2 for 128x128 tiles.
    Raises:
        ValueError: ``block_scaling_dim`` is neither 1 nor 2.
    """

    dtype: DType
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int

    block_len: ClassVar[int] = FLOAT8_BLOCK
    _storage_class = Float8BlockwiseQTensorStorage
    _tensor_class = Float8BlockwiseQTensor
    _takes_sources = True
    _minimum_rank = 2
    _layout_fields = ("dtype", "block_scaling_dim", "force_pow_2_scales")
    _compatible_recipe = "Float8BlockScaling"

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim is {block_scaling_dim!r}; use 1 (1x128) or 2 (128x128)")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._freeze(
            dtype=fp8_dtype_of(fp8_dtype),
            amax_epsilon=float(amax_epsilon),
            force_pow_2_scales=bool(force_pow_2_scales),
            block_scaling_dim=int(block_scaling_dim),
        )

    __call__ = Quantizer.quantize

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        rows, columns = matrix_dims(shape)
        row_blocks, column_blocks = cdiv(columns, FLOAT8_BLOCK), cdiv(rows, FLOAT8_BLOCK)
        align = FLOAT8_BLOCK_SCALE_ALIGNMENT
        if self.block_scaling_dim == 2:
            rowwise_scale = (column_blocks, round_up(row_blocks, align))
            columnwise_scale = (row_blocks, round_up(column_blocks, align))
        else:
            rowwise_scale = (row_blocks, round_up(rows, align))
            columnwise_scale = (column_blocks, round_up(columns, align))
        kept = Float8BlockwiseQTensorStorage.buffer_attributes(self.rowwise_usage, self.columnwise_usage)
        buffers: BufferTable = {
            "_rowwise_data": (tuple(shape), torch.uint8),
            "_rowwise_scale_inv": (rowwise_scale, torch.float32),
            "_columnwise_data": ((columns, *shape[:-1]), torch.uint8),
            "_columnwise_scale_inv": (columnwise_scale, torch.float32),
        }
        return describe_usage(buffers, kept)

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return numerics.float8_block.quantize(
            x,
            self._element_format(),
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            block_dim=self.block_scaling_dim,
            power_2=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
        )

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        data, scale_inv = buffers
        decoders = numerics.dequantize
        decode = decoders.float8_block_columnwise if columnwise else decoders.float8_block_rowwise
        return decode(data, scale_inv, self._element_format(), dtype, two_d=self.block_scaling_dim == 2)

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        # only power-of-two scales fold into bf16 without rounding
        exact = dtype if self.force_pow_2_scales else torch.float32
        decoded = self._decode(numerics, buffers, columnwise, exact)
        matrix = decoded.reshape(-1, decoded.shape[-1])
        return GemmOperand(matrix.t() if columnwise else matrix, None)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        matrix = codes_as_matrix(buffers[0], self._element_format(), columnwise)
        # the GEMM reads scales outer-dim-major, which is how they are stored: hand over the transposed view
        return NativeOperand(matrix, buffers[1].t(), "128x128" if self.block_scaling_dim == 2 else "1x128")
