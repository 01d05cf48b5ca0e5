"""Block scaling: recipes with one scale per block of elements."""

from __future__ import annotations

from dataclasses import field

from .. import _environment as environment
from .._checks import is_one_of, shown
from ..quantizers import Float8BlockQuantizer, NVFP4Quantizer, Quantizer
from .base import (
    BACKWARD_TENSOR_TYPES,
    BackwardOverride,
    Format,
    HighPrecisionBlocks,
    MMParams,
    QParams,
    Recipe,
    SavedActivations,
    fill_qparams,
    flag_field,
    fp8_dtype,
    own_qparams,
    qparams_of,
    recipe_class,
    refuse_pure_e5m2,
)


@recipe_class
class Float8BlockScaling(Recipe):
    """FP8 with fp32 scales per 1x128 block or 128x128 tile.

    Args:
        use_f32_scales: any fp32 scale instead of powers of two; default from NARROWCAST_FP8_BLOCK_SCALING_FP32_SCALES.
        fp8_format: E4M3 or HYBRID.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 or 2; no GEMM may combine 2 with 2.
        fp8_quant_*: per operand; default follows ``use_f32_scales``.
        fp8_gemm_*: the split accumulator is mandatory.
    """

    _family = "float8_block"

    use_f32_scales: bool = flag_field("FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = field(default_factory=lambda: 1)
    w_block_scaling_dim: int = field(default_factory=lambda: 2)
    grad_block_scaling_dim: int = field(default_factory=lambda: 1)
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_gemm_dgrad: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_gemm_wgrad: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def _derive(self) -> None:
        fill_qparams(self, not self.use_f32_scales)

    def _dims(self) -> dict[str, int]:
        return {
            "x_block_scaling_dim": self.x_block_scaling_dim,
            "w_block_scaling_dim": self.w_block_scaling_dim,
            "grad_block_scaling_dim": self.grad_block_scaling_dim,
        }

    def _check_together(self) -> None:
        dims = self._dims()
        if list(dims.values()).count(2) > 1:
            raise ValueError(f"a GEMM cannot multiply two 128x128-scaled operands; got {dims}")

    def _check(self) -> None:
        super()._check()
        refuse_pure_e5m2(self, self.fp8_format)
        for name, dim in self._dims().items():
            if not is_one_of(dim, (1, 2)):
                raise ValueError(f"{name} is {shown(dim)}; use 1 (1x128) or 2 (128x128)")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(f"{name}: 128-block FP8 always accumulates split; use MMParams(True)")

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        params = qparams_of(self, "fp8_quant", tensor_type)
        dims: dict[str, int] = {"weight": self.w_block_scaling_dim}
        dims.update((kind, self.grad_block_scaling_dim) for kind in BACKWARD_TENSOR_TYPES)
        return Float8BlockQuantizer(
            fp8_dtype(self.fp8_format, tensor_type),
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dims.get(tensor_type, self.x_block_scaling_dim),
        )


_OPERANDS = ("fwd_inp", "fwd_weight", "bwd_grad")


@recipe_class
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 elements, E4M3 scales per 16, one amax per tensor.

    Args:
        disable_rht: no Hadamard rotation of wgrad operands.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: 1x16 blocks for weights instead of 16x16 tiles.
        row_scaled_activation: one amax per row of the input; needs ``disable_rht=True``.
        nvfp4_4over6: "none", "weights", "activations" or "all"; the last two need ``disable_rht=True``.
        nvfp4_4over6_e4m3_use_256: for which of those the tensor amax maps to 256 instead of 448.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
        fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad: rotation, rounding and tiles per operand; default
            follows the ``disable_`` fields.

    The default of each of the others is that of the environment variable NARROWCAST_NVFP4_<FIELD>, without a second
    ``nvfp4_``.

    ``high_precision_blocks`` are the 2 first and 8 last of 62 blocks, 16% of the linear layers, which NVIDIA's 12B
    model keeps in bf16, and the same shares of other models (Pretraining Large Language Models with NVFP4,
    arXiv:2509.25149, section 4.1). :func:`narrowcast.convert` follows it unless ``blocks=True``.
    """

    _family = "nvfp4"

    high_precision_blocks = HighPrecisionBlocks(2 / 62, 8 / 62, "arXiv:2509.25149, section 4.1")

    disable_rht: bool = flag_field("NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = flag_field("NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = flag_field("NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = flag_field("NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = field(default_factory=lambda: environment.read_text("NVFP4_4OVER6", "none"))
    nvfp4_4over6_e4m3_use_256: str = field(
        default_factory=lambda: environment.read_text("NVFP4_4OVER6_E4M3_USE_256", "all")
    )
    nvfp4_4over6_err_mode: str = field(
        default_factory=lambda: environment.read_text("NVFP4_4OVER6_ERR_MODE", "MAE").upper()
    )
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None
    fp4_quant_fwd_inp: QParams | None = None
    fp4_quant_fwd_weight: QParams | None = None
    fp4_quant_bwd_grad: QParams | None = None

    def _check(self) -> None:
        super()._check()
        if self.fp4_format is not Format.E2M1 or self.fp8_format is not Format.E4M3:
            raise ValueError(
                f"fp4_format is {shown(self.fp4_format)} and fp8_format {shown(self.fp8_format)}; NVFP4 is E2M1 "
                "elements with E4M3 scales, leave both out"
            )
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if not is_one_of(getattr(self, name), ("none", "weights", "activations", "all")):
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))}; use 'none', 'weights', 'activations' or 'all', "
                    f"also in NARROWCAST_{name.upper()}"
                )
        if not is_one_of(self.nvfp4_4over6_err_mode, ("MAE", "MSE")):
            raise ValueError(
                f"nvfp4_4over6_err_mode is {shown(self.nvfp4_4over6_err_mode)}; use 'MAE' or 'MSE', also in "
                "NARROWCAST_NVFP4_4OVER6_ERR_MODE"
            )

    def _check_together(self) -> None:
        if not self.disable_rht and self.nvfp4_4over6 in ("activations", "all"):
            raise ValueError(
                f"nvfp4_4over6={shown(self.nvfp4_4over6)} does not combine with the Hadamard rotation of activations; "
                "pass disable_rht=True, or nvfp4_4over6='weights'"
            )
        if not self.disable_rht and self.row_scaled_activation:
            raise ValueError(
                "row_scaled_activation=True does not combine with the Hadamard rotation of activations; "
                "pass disable_rht=True"
            )
        rotated = [getattr(self, f"fp4_quant_{name}").random_hadamard_transform for name in _OPERANDS]
        if rotated[0] != rotated[2] or rotated[1]:
            raise ValueError(
                f"random_hadamard_transform of {_OPERANDS} is {rotated}; it cancels in wgrad where inputs and "
                "gradients both have it: switch it on for both or for neither, and off for weights"
            )

    def _derive(self) -> None:
        rht = not self.disable_rht
        derived = {
            "fp4_quant_fwd_inp": QParams(False, 0.0, rht, False, False, True),
            "fp4_quant_fwd_weight": QParams(False, 0.0, False, False, not self.disable_2d_quantization, True),
            "fp4_quant_bwd_grad": QParams(False, 0.0, rht, not self.disable_stochastic_rounding, False, True),
        }
        for name, params in derived.items():
            if own_qparams(self, name) is None:
                object.__setattr__(self, name, params)

    def _chosen(self, choice: str, tensor_type: str) -> bool:
        group = "weights" if tensor_type == "weight" else "activations"
        return tensor_type not in BACKWARD_TENSOR_TYPES and choice in ("all", group)

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        params = qparams_of(self, "fp4_quant", tensor_type)
        is_activation = tensor_type != "weight" and tensor_type not in BACKWARD_TENSOR_TYPES
        four_over_six = self._chosen(self.nvfp4_4over6, tensor_type)
        use_256 = four_over_six and self._chosen(self.nvfp4_4over6_e4m3_use_256, tensor_type)
        return NVFP4Quantizer(
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=self.row_scaled_activation and is_activation,
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if use_256 else 448,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
        )
