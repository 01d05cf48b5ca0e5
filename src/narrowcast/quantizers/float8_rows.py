"""FP8 quantizers with the scales of inference engines: one per row, or one per 128 elements of a row."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, not_among, numbers, shown
from ..formats import ELEMENT_FORMATS, FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT, DType
from ..functional import GemmOperand, NativeOperand
from ..reference import float8_rows
from ..tensors import Float8RowsTensor, Float8RowsTensorStorage
from .arguments import FP8_ELEMENTS, fp8_dtype_of
from .codes import codes_as_matrix
from .float8_blockwise import Float8BlockQuantizer
from .quantizer import Quantizer


def _check_rule(rule: str, smallest_scale: float) -> None:
    if not is_one_of(rule, float8_rows.RULES):
        raise ValueError(f"rule is {not_among(rule, float8_rows.RULES)}")
    if rule in float8_rows.TRAINING_RULES and smallest_scale:
        raise ValueError(
            f"smallest_scale is {smallest_scale}; rule={shown(rule)} has amax_epsilon alone, leave it 0"
        )


class Float8RowsQuantizer(Quantizer):
    """FP8 data with one fp32 scale per row, and per column in the column-wise data.

    On GPUs with FP8 a Triton kernel multiplies the codes; those of grouped layers need ``emulate=True``.

    Args:
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.
        rule: how scales and codes are computed, one of ``reference.float8_rows.RULES``.
        amax_epsilon: lower bound of a row's amax.
        smallest_scale: lower bound of its scale; an engine's rule alone takes it.
    Raises:
        ValueError: another rule, or one for training with a ``smallest_scale``.
    """

    dtype: DType
    rule: str
    amax_epsilon: float
    smallest_scale: float

    _storage_class = Float8RowsTensorStorage
    _tensor_class = Float8RowsTensor
    _layout_fields = ("dtype",)
    _elements = FP8_ELEMENTS

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rule: str = "divide",
        amax_epsilon: float = 0.0,
        smallest_scale: float = 0.0,
    ) -> None:
        numbers(amax_epsilon=amax_epsilon, smallest_scale=smallest_scale)
        self._freeze(
            dtype=fp8_dtype_of(fp8_dtype),
            rule=rule,
            amax_epsilon=float(amax_epsilon),
            smallest_scale=float(smallest_scale),
        )
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check_fields()

    __call__ = Quantizer.quantize

    def _check_fields(self) -> None:
        super()._check_fields()
        _check_rule(self.rule, self.smallest_scale)

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        rules: Any = {"rule": self.rule, "epsilon": self.amax_epsilon}
        element, buffers = ELEMENT_FORMATS[self.dtype], []
        if self.rule in float8_rows.TRAINING_RULES and self.rowwise_usage and self.columnwise_usage:
            codes, of_rows, transposed, of_columns = numerics.float8_rows.quantize_both(x, element, **rules)
            sizes = (x.shape[-1], *x.shape[:-1])
            return [codes, of_rows.view(-1), transposed.view(sizes), of_columns.view(-1)]
        rules["smallest"] = self.smallest_scale
        for columnwise in self._directions():
            source = float8_rows.transposed(x) if columnwise else x
            codes, scale_inv = numerics.float8_rows.quantize(source, element, **rules)
            sizes = (x.shape[-1], *x.shape[:-1]) if columnwise else x.shape
            buffers += [codes.view(sizes), scale_inv.view(-1)]
        return buffers

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        (codes, scale_inv), fmt = buffers, ELEMENT_FORMATS[self.dtype]
        if not columnwise:
            return numerics.dequantize.float8_rows(codes, scale_inv, fmt, dtype)  # type: ignore[no-any-return]
        values = numerics.dequantize.float8_rows(codes.flatten(1), scale_inv, fmt, dtype)
        return values.t().contiguous().view(*codes.shape[1:], codes.shape[0])

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        operand = super()._gemm_operand(numerics, buffers, columnwise, dtype)
        if self.rule != "bfloat16":
            return operand
        return GemmOperand(operand.values.bfloat16().to(dtype), None)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand:
        codes, scale_inv = buffers
        return NativeOperand(
            codes_as_matrix(codes, ELEMENT_FORMATS[self.dtype], columnwise), scale_inv, "row"
        )

    def _scales_are_powers(self) -> bool:
        return self.rule == "training_power_2"


class Float8GroupsQuantizer(Float8BlockQuantizer):
    """FP8 data with one fp32 scale per 1 x 128 elements, row-wise by the rule of an engine.

    The column-wise data, which only training reads, are those of :class:`Float8BlockQuantizer` with powers of two.

    Args:
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.
        rule: as of :class:`Float8RowsQuantizer`.
        amax_epsilon: lower bound of a group's amax.
        smallest_scale: lower bound of its scale.
    Raises:
        ValueError: another rule.
    """

    rule: str
    smallest_scale: float

    _layout_fields = ("dtype", "block_scaling_dim")

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rule: str = "divide",
        amax_epsilon: float = 0.0,
        smallest_scale: float = 0.0,
    ) -> None:
        numbers(smallest_scale=smallest_scale)
        _check_rule(rule, smallest_scale)
        self._freeze(rule=rule, smallest_scale=float(smallest_scale))
        super().__init__(
            fp8_dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            amax_epsilon=amax_epsilon,
            force_pow_2_scales=True,
            block_scaling_dim=1,
        )

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        if len(x.shape) < 2:
            return super()._encode(numerics, x, seed)
        element, buffers = ELEMENT_FORMATS[self.dtype], []
        if self.rowwise_usage:
            buffers += numerics.float8_rows.quantize(
                x,
                element,
                rule=self.rule,
                epsilon=self.amax_epsilon,
                smallest=self.smallest_scale,
                group=FLOAT8_BLOCK,
                alignment=FLOAT8_BLOCK_SCALE_ALIGNMENT,
            )
        if self.columnwise_usage:
            buffers += numerics.float8_block.quantize(
                x, element, rowwise=False, columnwise=True, block_dim=1, power_2=True, epsilon=0.0
            )
        return buffers

    def _scales_are_powers(self) -> bool:
        return False
