"""Row-wise scaling: FP8 with one scale for each row of both operands of a GEMM, as torchao's "rowwise"."""

from __future__ import annotations

from dataclasses import field

from ..quantizers import (
    Float8CurrentScalingQuantizer,
    Float8RowsQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
)
from .base import (
    BackwardOverride,
    Format,
    MMParams,
    QParams,
    Recipe,
    SavedActivations,
    fill_qparams,
    flag_field,
    fp8_dtype,
    qparams_of,
    recipe_class,
    refuse_pure_e5m2,
)


@recipe_class
class Float8RowwiseScaling(Recipe):
    """FP8 with one fp32 scale per row along the contraction of each GEMM.

    A token has one scale in fprop and an output feature of the weight has one; the operands of dgrad and wgrad that are
    read column-wise have one scale per column. The defaults are those of torchao's recipe "rowwise": E4M3 for all
    operands, powers of two, and an amax of at least 1e-12. Its scale is rounded down exactly here, and by ``log2`` in
    fp32 there.

    Args:
        use_power_2_scales: powers of two only.
        high_precision_wgrad: the GEMM of the weight gradient multiplies the input and the gradient in high precision,
            and dgrad reads the weight with one scale for the tensor, as in torchao's "rowwise_with_gw_hp".
        fp8_format: E4M3 or HYBRID.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: per operand; default follows the first field.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation per GEMM.
    """

    _family = "float8_rows"

    use_power_2_scales: bool = True
    high_precision_wgrad: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(False))
    fp8_gemm_dgrad: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_gemm_wgrad: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def _derive(self) -> None:
        fill_qparams(self, self.use_power_2_scales, 1e-12)

    def _check(self) -> None:
        super()._check()
        refuse_pure_e5m2(self, self.fp8_format)

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        params = qparams_of(self, "fp8_quant", tensor_type)
        element = fp8_dtype(self.fp8_format, tensor_type)
        rows = Float8RowsQuantizer(
            element,
            rule="training_power_2" if params.power_2_scale else "training",
            amax_epsilon=params.amax_epsilon,
        )
        if not self.high_precision_wgrad:
            return rows
        columns: Quantizer = IdentityQuantizer()
        if tensor_type == "weight":
            columns = Float8CurrentScalingQuantizer(
                element, force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon
            )
        return HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)
