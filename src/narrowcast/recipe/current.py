"""Current scaling: per-tensor FP8 with scales from the tensors themselves."""

from __future__ import annotations

from dataclasses import field

from ..quantizers import Float8CurrentScalingQuantizer, Quantizer
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
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 with the scale from the tensor itself.

    Args:
        use_power_2_scales: powers of two only; default from NARROWCAST_FP8_CURRENT_SCALING_POWER_2_SCALES.
        fp8_format: HYBRID or E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: per operand; default follows the first field.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation per GEMM.
    """

    _family = "current"

    use_power_2_scales: bool = flag_field("FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
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
        fill_qparams(self, self.use_power_2_scales)

    def _check(self) -> None:
        super()._check()
        refuse_pure_e5m2(self, self.fp8_format)

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        params = qparams_of(self, "fp8_quant", tensor_type)
        return Float8CurrentScalingQuantizer(
            fp8_dtype(self.fp8_format, tensor_type),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )
