"""NVFP4 quantizer: E2M1 data, E4M3 scales per 16 elements, one fp32 amax."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import kernels, reference
from .._checks import flags, is_one_of, shown, whole
from ..formats import (
    NVFP4,
    NVFP4_EXCLUSIONS,
    NVFP4_ROW_SCALED,
    RHT_SIGN_MASK,
    DType,
    Layout,
    round_to_float32,
)
from ..functional import GemmOperand, NativeOperand
from ..tensors import NVFP4Tensor, NVFP4TensorStorage
from .amax_reduction import AmaxReducing
from .arguments import element_dtype_of
from .quantizer import Quantizer

# this class's names for options of the numerics
_OPTIONS = {
    "row_scaled": "row_scaled_nvfp4",
    "two_d": "with_2d_quantization",
    "rht": "with_rht",
    "four_over_six": "nvfp4_use_4over6",
    "stochastic rounding": "stochastic_rounding",
}


class NVFP4Quantizer(AmaxReducing):
    """Two-level scaled FP4.

    Args:
        fp4_dtype: E2M1.
        rowwise, columnwise: directions to produce.
        with_amax_reduction: reduce the amax of each direction over the process group that :meth:`quantize` is given.
            Not for recipes: layers have no group to give.
        amax_reduction_group: deprecated here; pass the group to :meth:`quantize`.
        with_rht: rotate column-wise data by the random Hadamard transform; rotated values are rounded to bf16, so a
            wider input gains nothing there.
        with_post_rht_amax: accepted for compatibility: column-wise amax is always taken after the rotation.
        with_2d_quantization: one scale per 16x16 tile; column-wise of the rotated data, with ``with_rht``.
        stochastic_rounding: round elements stochastically; the stream comes from the default generator.
        row_scaled_nvfp4: one amax per row instead of one per tensor.
        nvfp4_use_4over6: per block, map the amax to 6 or to 4, whichever errs less.
        nvfp4_e4m3_max: 448 or 256, the block-scale value that the tensor's amax maps to.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
        with_random_sign_mask: fixed random signs in the rotation.
    Raises:
        ValueError: a combination the format does not define; the message names both options.
    """

    dtype: DType
    with_rht: bool
    with_post_rht_amax: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str
    rht_matrix_random_sign_mask_t: int

    _storage_class = NVFP4TensorStorage
    _tensor_class = NVFP4Tensor
    _layout_fields = (
        "dtype",
        "with_rht",
        "with_2d_quantization",
        "row_scaled_nvfp4",
        "nvfp4_e4m3_max",
        "rht_matrix_random_sign_mask_t",
    )
    _shares_amax = _takes_groups = _rotates = True
    _elements = (DType.kFloat4E2M1,)

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        flags(
            with_amax_reduction=with_amax_reduction, with_rht=with_rht, with_post_rht_amax=with_post_rht_amax
        )
        flags(with_2d_quantization=with_2d_quantization, stochastic_rounding=stochastic_rounding)
        flags(row_scaled_nvfp4=row_scaled_nvfp4, nvfp4_use_4over6=nvfp4_use_4over6)
        flags(with_random_sign_mask=with_random_sign_mask)
        whole(nvfp4_e4m3_max=nvfp4_e4m3_max)
        self._freeze(
            dtype=element_dtype_of("fp4_dtype", fp4_dtype, *self._elements),
            with_amax_reduction=bool(with_amax_reduction),
            with_rht=bool(with_rht),
            with_post_rht_amax=bool(with_post_rht_amax),
            with_2d_quantization=bool(with_2d_quantization),
            stochastic_rounding=bool(stochastic_rounding),
            row_scaled_nvfp4=bool(row_scaled_nvfp4),
            nvfp4_use_4over6=bool(nvfp4_use_4over6),
            nvfp4_e4m3_max=int(nvfp4_e4m3_max),
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
            rht_matrix_random_sign_mask_t=RHT_SIGN_MASK if with_random_sign_mask else 0,
        )
        if amax_reduction_group is not None:
            self._freeze(amax_reduction_group=amax_reduction_group)
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check_fields()

    __call__ = Quantizer.quantize

    def _check_fields(self) -> None:
        super()._check_fields()
        clashes = [("row_scaled_nvfp4", "with_amax_reduction")]
        clashes += [(_OPTIONS[first], _OPTIONS[second]) for first, second in NVFP4_EXCLUSIONS]
        for first, second in clashes:
            if getattr(self, first) and getattr(self, second):
                raise ValueError(
                    f"NVFP4 does not define {first} together with {second}; switch one of them off"
                )
        if self.nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"nvfp4_e4m3_max is {self.nvfp4_e4m3_max}; use 448 or 256")
        if not is_one_of(self.nvfp4_4over6_err_mode, ("MAE", "MSE")):
            raise ValueError(
                f"nvfp4_4over6_err_mode is {shown(self.nvfp4_4over6_err_mode)}; use 'MAE' or 'MSE'"
            )

    @property
    def with_random_sign_mask(self) -> bool:
        """Whether the rotation has its fixed random signs."""
        return self.rht_matrix_random_sign_mask_t != 0

    @property
    def rht_matrix(self) -> Tensor:
        """The 16x16 rotation, bf16 on the CPU; signs depend on the sign flag alone, never on ``with_rht``."""
        return reference.hadamard.rht_matrix(self.with_random_sign_mask, torch.device("cpu"), torch.bfloat16)

    def _rotation(self, columnwise: bool) -> int | None:
        return self.rht_matrix_random_sign_mask_t if columnwise and self.with_rht else None

    def _spans_rows(self) -> bool:
        return self.with_2d_quantization or not self.row_scaled_nvfp4

    def _is_stochastic(self) -> bool:
        return self.stochastic_rounding

    def is_quantizable(self, tensor: Tensor) -> bool:
        return self._takes(tensor) and not self.row_scaled_nvfp4

    def _format_layout(self) -> Layout:
        return NVFP4_ROW_SCALED if self.row_scaled_nvfp4 else NVFP4

    def _of_groups(self, columnwise: bool) -> tuple[Quantizer, str] | None:
        if not self._takes_groups or self.with_amax_reduction:
            return None
        return self.with_usage(rowwise=not columnwise, columnwise=columnwise), "padded"

    def _options(self, seed: Tensor | None) -> dict[str, Any]:
        return {
            "two_d": self.with_2d_quantization,
            "rht": self.with_rht,
            "random_signs": self.with_random_sign_mask,
            "row_scaled": self.row_scaled_nvfp4,
            "four_over_six": self.nvfp4_use_4over6,
            "e4m3_max": self.nvfp4_e4m3_max,
            "error_mode": self.nvfp4_4over6_err_mode,
            "seed": seed,
        }

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        if self.with_amax_reduction:
            self._check_alone()
        if self.stochastic_rounding and seed is None:
            raise ValueError("stochastic rounding needs a seed: pass narrowcast.functional.draw_seed(x)")
        options = self._options(seed)
        if numerics is kernels and not numerics.nvfp4.supports(**options):
            numerics = reference
        return numerics.nvfp4.quantize(
            x, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage, **options
        )

    def _encode_scaled(
        self, numerics: ModuleType, x: Tensor, scale: Tensor, amax: Tensor | None
    ) -> list[Tensor]:
        # computed outside: the directions' amaxes, and a seed if rounding is stochastic
        return reference.nvfp4.quantize(
            x,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            amaxes=(scale[:1], scale[-1:]),
            **self._options(amax),
        )

    def _amax_to_share(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> Tensor:
        own = self._without_reduction()._encode(numerics, x, seed)
        first, last = own[-2:] if self.rowwise_usage and self.columnwise_usage else own[-1:] * 2
        return torch.cat([first, last])  # they come last

    def _decode_options(self, buffers: list[Tensor], columnwise: bool) -> dict[str, Any]:
        padded = 2 * buffers[0].shape[-1]
        if not columnwise:
            return {"e4m3_max": self.nvfp4_e4m3_max, "columns": padded}
        return {
            "e4m3_max": self.nvfp4_e4m3_max,
            "rows": padded,
            "rht": self.with_rht,
            "random_signs": self.with_random_sign_mask,
        }

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        # E2M1 * E4M3 has at most six significant bits: exact in bf16; the amax waits for the fp32 result.
        # Column-wise values stay rotated: the rotation cancels between the two operands of the wgrad.
        data, scale_inv, amax = buffers
        matrix = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
        values = numerics.dequantize.nvfp4_block_scaled(matrix, scale_inv, dtype)
        factor = self._tensor_scale(amax)
        return GemmOperand(values, factor.view(-1, 1) if self.row_scaled_nvfp4 else factor)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        if not self._format_layout().native:
            return None
        data, scale_inv, amax = buffers
        codes = data.reshape(math.prod(data.shape[:-1]), data.shape[-1]).view(torch.float4_e2m1fn_x2)
        return NativeOperand(codes, scale_inv, self._format_layout().native, self._tensor_scale(amax))

    def _tensor_scale(self, amax: Tensor) -> Tensor:
        """Return the tensor's factor of block scales times codes."""
        return amax * round_to_float32(1.0 / round_to_float32(6.0 * self.nvfp4_e4m3_max))
