"""Recipes: frozen descriptions of how a module quantizes each operand of its three GEMMs.

A recipe builds its quantizers once, when it is made, and never changes; modules read them from it. Two recipes with
equal fields are equal, so entering one instead of the other changes nothing and compiles nothing anew.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from . import _environment as environment
from .formats import E2M1, E2M3, E3M2, E4M3, E5M2, DType
from .quantizers import (
    DelayedFloat8Quantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP4Quantizer,
    MXFP6Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    OperandHandles,
    Quantizer,
    QuantizerHandle,
    handle_of,
)
from .roles import QuantizerRole

BackwardOverride = Literal["high_precision", "dequantized"] | None


class Format(enum.Enum):
    """Element formats of forward and backward tensors."""

    E2M1 = "E2M1"
    E2M3 = "E2M3"
    E3M2 = "E3M2"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def max_fwd(self) -> float:
        """Largest value of forward tensors."""
        return (E4M3 if self is Format.HYBRID else _ELEMENTS[self.value]).max

    @property
    def max_bwd(self) -> float:
        """Largest value of backward tensors."""
        return (E5M2 if self is Format.HYBRID else _ELEMENTS[self.value]).max


_ELEMENTS = {element.name.upper(): element for element in (E2M1, E2M3, E3M2, E4M3, E5M2)}


@dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates: with the split accumulator, or (False) with the tensor cores' fast one."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one operand is quantized, where a recipe leaves a choice.

    ``derived``: filled in by a recipe from its other fields, and again when ``dataclasses.replace`` changes those.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False
    derived: bool = field(default=False, compare=False, repr=False)


AmaxAlgorithm = Literal["max", "most_recent"] | Callable[..., Any]
Mode = Literal["forward", "backward"]


@dataclass(frozen=True)
class LinearHandles:
    """Quantizers of a linear layer's operands, ready for traced code.

    ``forward_state``, ``backward_state``: the delayed scaling that keeps the state of the delayed ones among them, by
    direction; None without any.
    """

    input: OperandHandles
    weight: OperandHandles
    grad_output: OperandHandles
    forward_state: DelayedScaling | None = None
    backward_state: DelayedScaling | None = None

    @property
    def managed(self) -> DelayedScaling | None:
        """The delayed scaling of either direction; None where the layer keeps no state."""
        return self.backward_state if self.forward_state is None else self.forward_state


@dataclass(frozen=True)
class BoundaryHandles:
    """Quantizers of what a linear layer hands to its neighbours, both directions at once."""

    output: QuantizerHandle
    grad_input: QuantizerHandle


# Slots of a linear layer's delayed-scaling state.
INPUT_SLOT, WEIGHT_SLOT, OUTPUT_SLOT = 0, 1, 2
GRAD_OUTPUT_SLOT, GRAD_INPUT_SLOT = 0, 1

FORWARD_TENSOR_TYPES = ("input", "weight", "output")
BACKWARD_TENSOR_TYPES = ("grad_output", "grad_input")
_TENSOR_TYPES: dict[str, tuple[str, ...]] = {
    "forward": FORWARD_TENSOR_TYPES,
    "backward": BACKWARD_TENSOR_TYPES,
}


def tensor_type_at(mode: Mode, slot: int, role: QuantizerRole | None = None) -> str:
    """Which operand a slot is for: what its role says, else what its position in the direction says."""
    if role is not None and role.tensor_type in (*FORWARD_TENSOR_TYPES, *BACKWARD_TENSOR_TYPES):
        return role.tensor_type
    kinds = _TENSOR_TYPES[mode]
    return kinds[slot % len(kinds)]


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
        object.__setattr__(self, "_linear", self._build_linear_handles(""))

    def _check(self) -> None:
        override = getattr(self, "backward_override", None)
        if override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f"backward_override is {override!r}; use None, 'high_precision' or 'dequantized'"
            )

    def _build_linear_handles(self, name: str) -> LinearHandles:
        forward, forward_state = self.resolve(
            "forward", [QuantizerRole("linear", "input", name), QuantizerRole("linear", "weight", name)]
        )
        backward, backward_state = self.resolve("backward", [QuantizerRole("linear", "grad_output", name)])
        return LinearHandles(
            OperandHandles.of(forward[INPUT_SLOT]),
            OperandHandles.of(forward[WEIGHT_SLOT]),
            OperandHandles.of(backward[GRAD_OUTPUT_SLOT]),
            forward_state,
            backward_state,
        )

    def boundary_handles(self, name: str = "") -> BoundaryHandles:
        """Quantizers of a linear layer called ``name`` for its output and for the gradient of its input.

        Raises:
            ValueError: one of them is scaled with delay where the layer's operands are not.
        """
        return _boundary_handles(self, name)

    def resolve(
        self, mode: Mode, roles: Sequence[QuantizerRole]
    ) -> tuple[list[Quantizer], DelayedScaling | None]:
        """Quantizers of one module and direction, one per role, and what renews the state of the delayed ones."""
        kinds = [tensor_type_at(mode, slot, role) for slot, role in enumerate(roles)]
        return [self.make_quantizer(kind, slot) for slot, kind in enumerate(kinds)], self.delayed_scaling()

    def delayed_scaling(self) -> DelayedScaling | None:
        """What renews the state of this recipe's quantizers; None where they keep none."""
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


@functools.lru_cache(maxsize=1024)
def _boundary_handles(recipe: Recipe, name: str) -> BoundaryHandles:
    forward, _ = recipe.resolve("forward", [QuantizerRole("linear", t, name) for t in FORWARD_TENSOR_TYPES])
    backward, _ = recipe.resolve(
        "backward", [QuantizerRole("linear", t, name) for t in BACKWARD_TENSOR_TYPES]
    )
    made = BoundaryHandles(
        handle_of(forward[OUTPUT_SLOT].with_usage(rowwise=True, columnwise=True)),
        handle_of(backward[GRAD_INPUT_SLOT].with_usage(rowwise=True, columnwise=True)),
    )
    handles = recipe.linear_handles(name)
    for kind, handle, state in (
        ("output", made.output, handles.forward_state),
        ("grad_input", made.grad_input, handles.backward_state),
    ):
        if handle.delayed and state is None:
            raise ValueError(
                f"the recipe scales only {kind} of {name!r} with delay, so nothing renews that scale; request delayed "
                "scaling for the operands of the GEMM in that direction, too"
            )
    return made


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
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        given = getattr(recipe, name)
        if given is None or given.derived:
            # literals, not defaults: a number read from a default becomes symbolic in a dynamic graph
            object.__setattr__(recipe, name, QParams(power_2_scale, 0.0, False, False, False, True))


def _qparams_of(recipe: Any, prefix: str, tensor_type: str) -> QParams:
    if tensor_type in BACKWARD_TENSOR_TYPES:
        return getattr(recipe, f"{prefix}_bwd_grad")
    return getattr(recipe, f"{prefix}_fwd_weight" if tensor_type == "weight" else f"{prefix}_fwd_inp")


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
    amax_compute_algo: AmaxAlgorithm = "max"
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
        if not isinstance(self.margin, int):
            raise ValueError(
                f"margin is {self.margin!r}; use a whole number, the scale is divided by 2**margin"
            )
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len!r}; use a whole number, at least 1")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo is {self.amax_compute_algo!r}; use 'max', 'most_recent' or a callable"
            )
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ValueError(
                f"scaling_factor_compute_algo is {self.scaling_factor_compute_algo!r}; use None or a callable"
            )

    def delayed_scaling(self) -> DelayedScaling:
        return self

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        return DelayedFloat8Quantizer(_fp8_dtype(self.fp8_format, tensor_type), slot)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 with the scale from the tensor itself.

    Args:
        use_power_2_scales: powers of two only; default from NARROWCAST_FP8_CURRENT_SCALING_POWER_2_SCALES.
        fp8_format: HYBRID or E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: per operand; default follows the first field.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation per GEMM.
    """

    use_power_2_scales: bool = field(
        default_factory=lambda: environment.read_flag("FP8_CURRENT_SCALING_POWER_2_SCALES")
    )
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
        params = _qparams_of(self, "fp8_quant", tensor_type)
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
class MXFP6BlockScaling(Recipe):
    """MXFP6: six-bit elements, one E8M0 scale per 32 of them.

    The default is E2M3 in the forward and E3M2 in the backward. Every group of 32 has a scale of its own, so inputs and
    weights, whose groups are narrow, gain more from a third mantissa bit; gradients, whose groups spread over more
    binades, would lose their small elements under E2M3 (a factor of 60 between its largest and its smallest value, 448
    under E3M2). It is the choice that HYBRID makes between the two FP8 formats.

    Args:
        forward_format: Format.E2M3 or Format.E3M2, of inputs, weights and outputs.
        backward_format: Format.E2M3 or Format.E3M2, of gradients.
        enable_2d_quantization: 32x32 tiles for weights.
    """

    forward_format: Format = Format.E2M3
    backward_format: Format = Format.E3M2
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        super()._check()
        _refuse_fp8_attention(self)
        for name in ("forward_format", "backward_format"):
            if getattr(self, name) not in (Format.E2M3, Format.E3M2):
                raise ValueError(
                    f"MXFP6BlockScaling got {name}={getattr(self, name)}; use Format.E2M3 or Format.E3M2"
                )

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        backward = tensor_type in BACKWARD_TENSOR_TYPES
        element = self.backward_format if backward else self.forward_format
        return MXFP6Quantizer(
            _ELEMENTS[element.value].dtype,
            with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight",
        )


@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """MXFP4: E2M1 elements, one E8M0 scale per 32 of them, all rounded to nearest.

    It has neither the second scale nor the rotation nor the stochastic rounding of :class:`NVFP4BlockScaling`, which
    are what makes four bits train; for gradients, consider ``backward_override``.

    Args:
        enable_2d_quantization: 32x32 tiles for weights.
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = field(default_factory=_emulate_default)

    def _check(self) -> None:
        super()._check()
        _refuse_fp8_attention(self)

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        return MXFP4Quantizer(with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight")


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
        params = _qparams_of(self, "fp8_quant", tensor_type)
        dims: dict[str, int] = {"weight": self.w_block_scaling_dim}
        dims.update((kind, self.grad_block_scaling_dim) for kind in BACKWARD_TENSOR_TYPES)
        return Float8BlockQuantizer(
            _fp8_dtype(self.fp8_format, tensor_type),
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dims.get(tensor_type, self.x_block_scaling_dim),
        )


@dataclass(frozen=True)
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

    The default of each is that of the environment variable NARROWCAST_NVFP4_<FIELD>, without a second ``nvfp4_``.
    """

    disable_rht: bool = field(default_factory=lambda: environment.read_flag("NVFP4_DISABLE_RHT"))
    disable_stochastic_rounding: bool = field(
        default_factory=lambda: environment.read_flag("NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    )
    disable_2d_quantization: bool = field(
        default_factory=lambda: environment.read_flag("NVFP4_DISABLE_2D_QUANTIZATION")
    )
    row_scaled_activation: bool = field(
        default_factory=lambda: environment.read_flag("NVFP4_ROW_SCALED_ACTIVATION")
    )
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
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f"nvfp4_4over6_err_mode is {self.nvfp4_4over6_err_mode!r}; use 'MAE' or 'MSE'")
        if not self.disable_rht and self.nvfp4_4over6 in ("activations", "all"):
            raise ValueError(
                f"nvfp4_4over6={self.nvfp4_4over6!r} does not combine with the Hadamard rotation of activations; "
                "pass disable_rht=True, or nvfp4_4over6='weights'"
            )
        if not self.disable_rht and self.row_scaled_activation:
            raise ValueError(
                "row_scaled_activation=True does not combine with the Hadamard rotation of activations; "
                "pass disable_rht=True"
            )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How inputs are quantized."""
        return QParams(False, 0.0, not self.disable_rht, False, False, True)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How weights are quantized."""
        return QParams(False, 0.0, False, False, not self.disable_2d_quantization, True)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How gradients are quantized."""
        return QParams(False, 0.0, not self.disable_rht, not self.disable_stochastic_rounding, False, True)

    def _chosen(self, choice: str, tensor_type: str) -> bool:
        group = "weights" if tensor_type == "weight" else "activations"
        return tensor_type not in BACKWARD_TENSOR_TYPES and choice in ("all", group)

    def make_quantizer(self, tensor_type: str, slot: int) -> Quantizer:
        params = _qparams_of(self, "fp4_quant", tensor_type)
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


@dataclass(frozen=True)
class DelayedScalingRequest:
    """What a factory returns to ask for a delayed-scaling slot; fields as in :class:`DelayedScaling`."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
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

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_by_name", {})

    def resolve(
        self, mode: Mode, roles: Sequence[QuantizerRole]
    ) -> tuple[list[Quantizer], DelayedScaling | None]:
        """Quantizers that the factory makes, one per role, and what renews the state of those it requested.

        Raises:
            ValueError: the factory returned None, or requests that differ. TypeError: it returned something else than
            a quantizer or a request.
        """
        made = [self._made_for(role) for role in roles]
        requests = [request for request in made if isinstance(request, DelayedScalingRequest)]
        if any(request != requests[0] for request in requests):
            raise ValueError(
                f"the delayed-scaling requests of one module and direction must be equal, got {requests}"
            )
        kinds = [tensor_type_at(mode, slot, role) for slot, role in enumerate(roles)]
        quantizers = [_requested(made[slot], kind, slot) for slot, kind in enumerate(kinds)]
        return quantizers, requests[0].as_recipe() if requests else None

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

    def linear_handles(self, name: str = "") -> LinearHandles:
        known = self._by_name.get(name)  # type: ignore[attr-defined]
        if known is not None:
            return known
        handles = self._build_linear_handles(name)
        if not torch.compiler.is_compiling():  # a graph keeps what it traced; it must not write here
            self._by_name[name] = handles  # type: ignore[attr-defined]
        return handles


def _requested(made: Quantizer | DelayedScalingRequest, tensor_type: str, slot: int) -> Quantizer:
    """The quantizer that a factory made, or the one it requested."""
    if isinstance(made, DelayedScalingRequest):
        return DelayedFloat8Quantizer(_fp8_dtype(made.fp8_format, tensor_type), slot)
    return made


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Multiple of rows that the recipe's GEMMs want from each group of a grouped GEMM."""
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    in_blocks_of_32 = (MXFP8BlockScaling, MXFP6BlockScaling, MXFP4BlockScaling)
    return 32 if isinstance(recipe, in_blocks_of_32) else 128 if recipe.nvfp4() else 16
