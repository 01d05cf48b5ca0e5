"""FP8 block quantizer: fp32 scales per 1x128 block or 128x128 tile."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import flags, is_one_of, numbers, shown
from ..formats import ELEMENT_FORMATS, FLOAT8_BLOCK, FLOAT8_BLOCK_1D, FLOAT8_BLOCK_2D, DType, Layout
from ..functional import Prologue
from ..tensors import Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
from .arguments import FP8_ELEMENTS, fp8_dtype_of
from .quantizer import Quantizer

FEW_ROWS = 16
"""Rows up to which a GEMM quantizes them itself."""


class Float8BlockQuantizer(Quantizer):
    """FP8 data with one fp32 scale per block of 128. A vector, or a number, is quantized as a matrix of one row.

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
    _takes_sources = _has_prologue = True
    _layout_fields = ("dtype", "block_scaling_dim", "force_pow_2_scales")
    _elements = FP8_ELEMENTS

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
        flags(force_pow_2_scales=force_pow_2_scales)
        numbers(amax_epsilon=amax_epsilon, block_scaling_dim=block_scaling_dim)
        self._freeze(
            dtype=fp8_dtype_of(fp8_dtype),
            amax_epsilon=float(amax_epsilon),
            force_pow_2_scales=bool(force_pow_2_scales),
            block_scaling_dim=block_scaling_dim,
        )
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check_fields()

    __call__ = Quantizer.quantize

    def _check_fields(self) -> None:
        super()._check_fields()
        if not is_one_of(self.block_scaling_dim, (1, 2)):
            raise ValueError(
                f"block_scaling_dim is {shown(self.block_scaling_dim)}; use 1 (1x128) or 2 (128x128)"
            )

    def is_quantizable(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and self._takes(tensor)  # a vector is, but no GEMM takes one

    def _spans_rows(self) -> bool:
        return self.block_scaling_dim == 2

    def _format_layout(self) -> Layout:
        return FLOAT8_BLOCK_2D if self.block_scaling_dim == 2 else FLOAT8_BLOCK_1D

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        if len(x.shape) < 2:  # a vector is a matrix of one row, and both directions' codes are vectors
            made = self._encode(numerics, x.reshape(1, -1), seed)
            return [buffer if at % 2 else buffer.reshape(-1) for at, buffer in enumerate(made)]
        return numerics.float8_block.quantize(
            x,
            ELEMENT_FORMATS[self.dtype],
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
        if data.dim() < 2:
            data = data.reshape((-1, 1) if columnwise else (1, -1))
        return super()._decode(numerics, [data, scale_inv], columnwise, dtype)

    def _decode_options(self, buffers: list[Tensor], columnwise: bool) -> dict[str, Any]:
        return {"fmt": self._element_format(), "two_d": self.block_scaling_dim == 2}

    def _prologue(self) -> Prologue | None:
        if not self._has_prologue or self.block_scaling_dim != 1 or self.dtype != DType.kFloat8E4M3:
            return None
        return Prologue("1x128", FEW_ROWS, self.force_pow_2_scales, self.amax_epsilon)

    def _scales_are_powers(self) -> bool:
        return self.force_pow_2_scales
