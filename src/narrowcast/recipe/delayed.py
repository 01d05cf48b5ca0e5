"""Delayed scaling: per-tensor FP8 with scales from earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, field
from typing import Any, Literal

from .._checks import is_one_of, is_whole, shown
from ..quantizers import DelayedFloat8Quantizer, Float8CurrentScalingQuantizer, Quantizer
from ..roles import QuantizerRole
from .base import (
    DELAYED_SLOTS,
    AmaxAlgorithm,
    BackwardOverride,
    Format,
    Mode,
    Recipe,
    SavedActivations,
    flag_field,
    fp8_dtype,
    recipe_class,
    refuse_pure_e5m2,
)


@recipe_class
class DelayedScaling(Recipe):
    """Per-tensor FP8 with the scale from earlier steps' amax; weights have that of their own.

    Scales are constant within a step. The optimizer's step renews them (:func:`narrowcast.renew_delayed_scaling`).

    Args:
        margin: scales of activations and gradients are divided by 2**margin; -32 to 32.
        fp8_format: HYBRID (E4M3 forward, E5M2 backward) or E4M3.
        amax_history_len: steps of history, 1 to 2**20.
        amax_compute_algo: "max", "most_recent", or a callable(history) -> amax.
        scaling_factor_compute_algo: None, or a callable(amax, old_scale, fp8_max, recipe) -> scale.
        reduce_amax: include the amax in ``reduce_delayed_scaling``.
        initial_scale: the first scales of layers that join codes of several ranks; all others begin with those of the
            tensors. "range": of activations 16 and of gradients 65536, so that a first step usually fits the format's
            range; "one": Transformer Engine's start, at which the gradients of a first step underflow.
        override_linear_precision: (False, False, False), as Transformer Engine had it: which of fprop, dgrad and wgrad
            stay in high precision.
        params_dtype, device: not read; Megatron-LM gives them to recipes as to layers.
    Raises:
        NotImplementedError: ``override_linear_precision`` names a GEMM.
    """

    _family = "delayed"

    margin: int = field(default_factory=lambda: 0)
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = field(default_factory=lambda: 1024)
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    initial_scale: Literal["range", "one"] = "range"
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None
    override_linear_precision: InitVar[Any] = (False, False, False)
    params_dtype: InitVar[Any] = None
    device: InitVar[Any] = None

    def __post_init__(self, override_linear_precision: Any, params_dtype: Any, device: Any) -> None:
        if not is_one_of(override_linear_precision, ((False, False, False),)):
            raise NotImplementedError(
                f"DelayedScaling(override_linear_precision={shown(override_linear_precision)}): leave it out, or use "
                "Float8RowwiseScaling(high_precision_wgrad=True), which keeps wgrad in high precision"
            )
        super().__post_init__()

    def _check(self) -> None:
        if self.backward_override is not None:
            raise ValueError("DelayedScaling takes no backward_override; use another recipe or None")
        super()._check()
        refuse_pure_e5m2(self, self.fp8_format)
        amax, scale, length = self.amax_compute_algo, self.scaling_factor_compute_algo, self.amax_history_len
        known_amax = callable(amax) or is_one_of(amax, ("max", "most_recent"))
        for name, fits, accepted in (
            ("initial_scale", is_one_of(self.initial_scale, ("range", "one")), "'range' or 'one'"),
            ("margin", is_whole(self.margin, -32, 32), "a whole number from -32 to 32, binary digits"),
            ("amax_history_len", is_whole(length, 1, 2**20), f"a whole number from 1 to {2**20}"),
            ("amax_compute_algo", known_amax, "'max', 'most_recent' or a callable"),
            ("scaling_factor_compute_algo", scale is None or callable(scale), "None or a callable"),
        ):
            if not fits:
                raise ValueError(f"{name} is {shown(getattr(self, name))}; use {accepted}")

    def delayed_scaling(self) -> DelayedScaling:
        return self

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        return delayed_quantizer(self, tensor_type)


def fp8_max(recipe: DelayedScaling, mode: Mode) -> float:
    """Return the largest value of the elements of a direction."""
    return recipe.fp8_format.max_fwd if mode == "forward" else recipe.fp8_format.max_bwd


# What a first step with joined codes may bring: activations up to 28, gradients up to 7/8. With the range of the
# formats below that, E4M3 keeps activations down to 1e-4 and E5M2 gradients down to 2e-10, where a scale of 1 loses
# gradients below 1e-5.
_FIRST_AMAX: dict[Mode, float] = {"forward": 28.0, "backward": 0.875}


def first_scale(recipe: DelayedScaling, mode: Mode) -> float:
    """Scale that ranks which join codes have before anything was seen."""
    if recipe.initial_scale == "one":
        return 1.0
    return fp8_max(recipe, mode) / 2**recipe.margin / _FIRST_AMAX[mode]


def delayed_quantizer(recipe: DelayedScaling, tensor_type: str) -> Quantizer:
    """Return the quantizer of a tensor; weights, and what was not seen yet, have the scales of their own amaxes."""
    dtype = fp8_dtype(recipe.fp8_format, tensor_type)
    if tensor_type == "weight":
        return Float8CurrentScalingQuantizer(dtype)
    mode: Mode = "backward" if tensor_type.startswith("grad") else "forward"
    return DelayedFloat8Quantizer(
        dtype, DELAYED_SLOTS[tensor_type], -fp8_max(recipe, mode) / 2**recipe.margin
    )


def resolve_both(
    recipe: Recipe, forward: Sequence[QuantizerRole], backward: Sequence[QuantizerRole], joins: bool
) -> tuple[list[Quantizer], list[Quantizer], DelayedScaling | None]:
    """Return the quantizers of both directions of a layer, and the recipe that renews delayed ones.

    Args:
        joins: ranks or batches join their codes, so that these cannot begin with scales of their own amaxes. They begin
            with :func:`first_scale`.
    Raises:
        ValueError: the directions are to be renewed by different rules.
    """
    one, rule = recipe.resolve("forward", forward)
    other, rule_of_other = recipe.resolve("backward", backward)
    rule = rule or rule_of_other
    if rule_of_other not in (None, rule):
        raise ValueError(
            f"the delayed-scaling requests of one layer must be equal, got {rule} forward and {rule_of_other} backward"
        )
    if joins and rule is not None:
        one, other = (
            [x.replace(unseen=scale) if isinstance(x, DelayedFloat8Quantizer) else x for x in some]
            for some, scale in ((one, first_scale(rule, "forward")), (other, first_scale(rule, "backward")))
        )
    return one, other, rule


DelayedScalingRequest = QuantizerRequest = DelayedScaling
"""A custom recipe's factory returns it to request a slot of state instead of a quantizer."""
