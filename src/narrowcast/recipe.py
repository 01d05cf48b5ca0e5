"""Recipes: frozen descriptions of how a module quantizes each operand of its three GEMMs.

A recipe builds its quantizers once, when it is made, and never changes; modules read them from it. Two recipes with
equal fields are equal, so entering one instead of the other changes nothing and compiles nothing anew.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import _environment as environment
from .formats import E2M1, E4M3, E5M2, DType
from .quantizers import (
    DelayedFloat8Quantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    OperandHandles,
    Quantizer,
)
from .roles import QuantizerRole

BackwardOverride = Literal["high_precision", "dequantized"] | None


class Format(enum.Enum):
    """Element formats of forward and backward tensors."""

    E2M1 = "E2M1"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def max_fwd(self) -> float:
        """Largest value of forward tensors."""
        return {"E2M1": E2M1.max, "E5M2": E5M2.max}.get(self.value, E4M3.max)

    @property
    def max_bwd(self) -> float:
        """Largest value of backward tensors."""
        return {"E2M1": E2M1.max, "E4M3": E4M3.max}.get(self.value, E5M2.max)


@dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates: with the split accumulator, or (False) with the tensor cores' fast one."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one operand is quantized, where a recipe leaves a choice."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True)
class LinearHandles:
    """Quantizers of a linear layer's operands, ready for traced code.

    ``managed``: the delayed scaling that keeps the state of the delayed ones among them, None without any.
    """

    input: OperandHandles
    weight: OperandHandles
    grad_output: OperandHandles
    managed: DelayedScaling | None = None


# Slots of a linear layer's delayed-scaling state.
INPUT_SLOT, WEIGHT_SLOT, OUTPUT_SLOT = 0, 1, 2
GRAD_OUTPUT_SLOT, GRAD_INPUT_SLOT = 0, 1

_QPARAMS = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad_output": "fp8_quant_bwd_grad",
    "grad_input": "fp8_quant_bwd_grad",
}
FORWARD_TENSOR_TYPES = ("input", "weight", "output")
BACKWARD_TENSOR_TYPES = ("grad_output", "grad_input")


def _emulate_default() -> bool:
    return environment.read_flag("EMULATE")


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes.

    Fields every recipe has: ``backward_override`` (None, "high_precision": backward on the original operands,
    "dequantized": backward on the dequantized row-wise operands) and ``emulate`` (run on a GPU without the native
    GEMM by decoding to bf16; default from NARROWCAST_EMULATE).
    """

    fp8_gemm_fprop = MMParams(False)
    fp8_gemm_dgrad = MMParams(True)
    fp8_gemm_wgrad = MMParams(True)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_linear", self._build_linear_handles())

    def _check(self) -> None:
        override = getattr(self, "backward_override", None)
        if override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f"backward_override is {override!r}; use None, 'high_precision' or 'dequantized'"
            )

    def _build_linear_handles(self) -> LinearHandles | None:
        return LinearHandles(
            OperandHandles.of(self.make_quantizer("input", INPUT_SLOT)),
            OperandHandles.of(self.make_quantizer("weight", WEIGHT_SLOT)),
            OperandHandles.of(self.make_quantizer("grad_output", GRAD_OUTPUT_SLOT)),
            self._managed(),
        )

    def _managed(self) -> DelayedScaling | None:
        """The delayed scaling behind this recipe's quantizers, if any."""
        return None

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        """Quantizer for one kind of tensor; ``slot`` is its position in delayed-scaling state."""
        raise NotImplementedError(f"{type(self).__name__} makes no quantizers of its own")

    def linear_handles(self, name: str = "") -> LinearHandles:
        """Quantizers of a linear layer called ``name``."""
        return self._linear  # type: ignore[attr-defined]

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is per-tensor current scaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this scales per tensor."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is 128-block FP8."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether this is a custom recipe."""
        return issubclass(cls, CustomRecipe)


def _fp8_dtype(fp8_format: Format, tensor_type: str) -> DType:
    backward = tensor_type in BACKWARD_TENSOR_TYPES
    return DType.kFloat8E5M2 if fp8_format is Format.HYBRID and backward else DType.kFloat8E4M3


def _refuse_pure_e5m2(recipe: Recipe, fp8_format: Format) -> None:
    if fp8_format not in (Format.E4M3, Format.HYBRID):
        raise ValueError(
            f"{type(recipe).__name__} got fp8_format={fp8_format}; training uses Format.E4M3 or Format.HYBRID"
        )


def _fill_qparams(recipe: Any, power_2_scale: bool) -> None:
    """Give the operands without settings of their own those that follow from the recipe's scale choice."""
    for name in _QPARAMS.values():
        if getattr(recipe, name) is None:
            # literals, not defaults: a number read from a default becomes symbolic in a dynamic graph
            object.__setattr__(recipe, name, QParams(power_2_scale, 0.0, False, False, False))


def _qparams_of(recipe: Any, tensor_type: str) -> QParams:
    return getattr(recipe, _QPARAMS.get(tensor_type, "fp8_quant_fwd_inp"))


def _refuse_fp8_attention(recipe: Recipe) -> None:
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name):
            raise NotImplementedError(f"{type(recipe).__name__}({name}=True): FP8 attention is not supported")


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8 with the scale from earlier steps' amax.

    Args:
        margin: scales are 2**margin below what the amax allows.
        fp8_format: HYBRID (E4M3 forward, E5M2 backward) or E4M3.
        amax_history_len: steps of history, at least 1.
        amax_compute_algo: "max", "most_recent", or a callable(history) -> amax.
        scaling_factor_compute_algo: None, or a callable(amax, old_scale, fp8_max, recipe) -> scale.
        reduce_amax: reduce over the amax group of the autocast.
    """

    margin: int = field(default_factory=lambda: 0)
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = field(default_factory=lambda: 1024)
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        if self.backward_override is not None:
            raise ValueError("DelayedScaling takes no backward_override; use another recipe or None")
        _refuse_pure_e5m2(self, self.fp8_format)
        _refuse_fp8_attention(self)
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len}; use at least 1")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo is {self.amax_compute_algo!r}; use 'max', 'most_recent' or a callable"
            )

    def _managed(self) -> DelayedScaling | None:
        return self

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        return DelayedFloat8Quantizer(_fp8_dtype(self.fp8_format, tensor_type), slot)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 with the scale from the tensor itself.

    Args:
        use_power_2_scales: powers of two only; default from NARROWCAST_USE_POWER_2_SCALES.
        fp8_format: HYBRID or E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: per operand; default follows the first field.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation per GEMM.
    """

    use_power_2_scales: bool = field(default_factory=lambda: environment.read_flag("USE_POWER_2_SCALES"))
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
    emulate: bool = field(default_factory=_emulate_default)

    def __post_init__(self) -> None:
        _fill_qparams(self, self.use_power_2_scales)
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        _refuse_pure_e5m2(self, self.fp8_format)
        _refuse_fp8_attention(self)

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        params = _qparams_of(self, tensor_type)
        return Float8CurrentScalingQuantizer(
            _fp8_dtype(self.fp8_format, tensor_type),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: one E8M0 scale per 32 elements.

    Args:
        margin: accepted for compatibility; must be 0, the format has no use for it.
        fp8_format: E4M3 or HYBRID.
        enable_2d_quantization: 32x32 tiles for weights.
    """

    margin: int = field(default_factory=lambda: 0)
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        super()._check()
        _refuse_pure_e5m2(self, self.fp8_format)
        _refuse_fp8_attention(self)
        if self.margin != 0:
            raise ValueError(
                f"MXFP8BlockScaling got margin={self.margin}; the format has no margin, leave it 0"
            )

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        return MXFP8Quantizer(
            _fp8_dtype(self.fp8_format, tensor_type),
            with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight",
        )


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with fp32 scales per 1x128 block or 128x128 tile.

    Args:
        use_f32_scales: any fp32 scale instead of powers of two; default from NARROWCAST_FP8_BLOCK_SCALING_FP32_SCALES.
        fp8_format: E4M3 or HYBRID.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 or 2; no GEMM may combine 2 with 2.
        fp8_quant_*: per operand; default follows ``use_f32_scales``.
        fp8_gemm_*: the split accumulator is mandatory.
    """

    use_f32_scales: bool = field(
        default_factory=lambda: environment.read_flag("FP8_BLOCK_SCALING_FP32_SCALES")
    )
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
    emulate: bool = field(default_factory=_emulate_default)

    def __post_init__(self) -> None:
        _fill_qparams(self, not self.use_f32_scales)
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        _refuse_pure_e5m2(self, self.fp8_format)
        _refuse_fp8_attention(self)
        dims = {
            "x_block_scaling_dim": self.x_block_scaling_dim,
            "w_block_scaling_dim": self.w_block_scaling_dim,
            "grad_block_scaling_dim": self.grad_block_scaling_dim,
        }
        for name, dim in dims.items():
            if dim not in (1, 2):
                raise ValueError(f"{name} is {dim!r}; use 1 (1x128) or 2 (128x128)")
        if list(dims.values()).count(2) > 1:
            raise ValueError(f"a GEMM cannot multiply two 128x128-scaled operands; got {dims}")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(f"{name}: 128-block FP8 always accumulates split; use MMParams(True)")

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        params = _qparams_of(self, tensor_type)
        dim = {"weight": self.w_block_scaling_dim, "grad_output": self.grad_block_scaling_dim}
        dim["grad_input"] = self.grad_block_scaling_dim
        return Float8BlockQuantizer(
            _fp8_dtype(self.fp8_format, tensor_type),
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dim.get(tensor_type, self.x_block_scaling_dim),
        )


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 elements, E4M3 scales per 16, one amax per tensor.

    Args:
        disable_rht: no Hadamard rotation of wgrad operands.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: 1x16 blocks for weights instead of 16x16 tiles.
        row_scaled_activation: one amax per row of the input; needs ``disable_rht=True``.
        nvfp4_4over6: "none", "weights", "activations" or "all".
        nvfp4_4over6_e4m3_use_256: for which of those the tensor amax maps to 256 instead of 448.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = field(
        default_factory=lambda: environment.read_flag("NVFP4_ROW_SCALED_ACTIVATION")
    )
    nvfp4_4over6: str = field(default_factory=lambda: environment.read_text("NVFP4_4OVER6", "none"))
    nvfp4_4over6_e4m3_use_256: str = field(
        default_factory=lambda: environment.read_text("NVFP4_4OVER6_E4M3_USE_256", "all")
    )
    nvfp4_4over6_err_mode: str = field(
        default_factory=lambda: environment.read_text("NVFP4_4OVER6_ERR_MODE", "MAE")
    )
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        super()._check()
        _refuse_fp8_attention(self)
        if self.fp4_format is not Format.E2M1 or self.fp8_format is not Format.E4M3:
            raise ValueError(
                f"NVFP4 is E2M1 elements with E4M3 scales; got {self.fp4_format} and {self.fp8_format}"
            )
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, name) not in ("none", "weights", "activations", "all"):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; use 'none', 'weights', 'activations' or 'all'"
                )

    def _chosen(self, choice: str, tensor_type: str) -> bool:
        group = "weights" if tensor_type == "weight" else "activations"
        return tensor_type not in BACKWARD_TENSOR_TYPES and choice in ("all", group)

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        is_weight = tensor_type == "weight"
        is_gradient = tensor_type in BACKWARD_TENSOR_TYPES
        four_over_six = self._chosen(self.nvfp4_4over6, tensor_type)
        use_256 = four_over_six and self._chosen(self.nvfp4_4over6_e4m3_use_256, tensor_type)
        return NVFP4Quantizer(
            with_rht=not is_weight and not self.disable_rht,
            with_post_rht_amax=not is_weight and not self.disable_rht,
            with_2d_quantization=is_weight and not self.disable_2d_quantization,
            stochastic_rounding=is_gradient and not self.disable_stochastic_rounding,
            row_scaled_nvfp4=self.row_scaled_activation and not is_weight and not is_gradient,
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if use_256 else 448,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
        )


@dataclass(frozen=True)
class DelayedScalingRequest:
    """What a factory returns to ask for a delayed-scaling slot; fields as in :class:`DelayedScaling`."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True

    def as_recipe(self) -> DelayedScaling:
        """The recipe whose update rule keeps the requested state."""
        return DelayedScaling(
            margin=self.margin,
            fp8_format=self.fp8_format,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
            reduce_amax=self.reduce_amax,
        )


QuantizerRequest = DelayedScalingRequest


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A recipe made of your own quantizers.

    Args:
        qfactory: called with a :class:`QuantizerRole`, returns a quantizer for that tensor.
        fp8_format: for delayed-scaling requests.
        quantization_alignment: row multiple for grouped GEMMs, positive.
    Raises:
        ValueError: no callable factory, or a non-positive alignment. The first use of a role raises ValueError when
        the factory returns None for it, TypeError when it returns something else than a quantizer.
    """

    qfactory: Callable[[QuantizerRole], Any] | None = None
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    quantization_alignment: int = field(default_factory=lambda: 128)
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        super()._check()
        _refuse_fp8_attention(self)
        if not callable(self.qfactory):
            raise ValueError(f"CustomRecipe needs a callable qfactory(role), got {self.qfactory!r}")
        if self.quantization_alignment <= 0:
            raise ValueError(
                f"quantization_alignment is {self.quantization_alignment}; use a positive number"
            )

    def _build_linear_handles(self) -> None:
        object.__setattr__(self, "_by_name", {})

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        return self._quantizer_from(self._made_for(QuantizerRole("linear", tensor_type)), tensor_type, slot)

    def _made_for(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """What the factory returns for a role, checked."""
        made = self.qfactory(role)  # type: ignore[misc]
        if made is None:
            raise ValueError(
                f"qfactory returned None for {role}; return an IdentityQuantizer to leave it alone"
            )
        # in a traced call the compiler stands something else in for the quantizer it has just made
        if not (torch.compiler.is_compiling() or isinstance(made, (Quantizer, DelayedScalingRequest))):
            raise TypeError(
                f"qfactory returned {type(made).__qualname__} for {role}; return a Quantizer or request"
            )
        return made

    @staticmethod
    def _quantizer_from(made: Quantizer | DelayedScalingRequest, tensor_type: str, slot: int) -> Quantizer:
        if isinstance(made, DelayedScalingRequest):
            return DelayedFloat8Quantizer(_fp8_dtype(made.fp8_format, tensor_type), slot)
        return made

    def linear_handles(self, name: str = "") -> LinearHandles:
        known = self._by_name.get(name)  # type: ignore[attr-defined]
        if known is not None:
            return known
        slots = {"input": INPUT_SLOT, "weight": WEIGHT_SLOT, "grad_output": GRAD_OUTPUT_SLOT}
        made = {kind: self._made_for(QuantizerRole("linear", kind, name)) for kind in slots}
        requests = [request for request in made.values() if isinstance(request, DelayedScalingRequest)]
        if any(request != requests[0] for request in requests):
            raise ValueError(f"the delayed-scaling requests of one module must be equal, got {requests}")
        operands = [
            OperandHandles.of(self._quantizer_from(made[kind], kind, slot)) for kind, slot in slots.items()
        ]
        handles = LinearHandles(*operands, managed=requests[0].as_recipe() if requests else None)
        if not torch.compiler.is_compiling():  # a graph keeps what it traced; it must not write here
            self._by_name[name] = handles  # type: ignore[attr-defined]
        return handles
