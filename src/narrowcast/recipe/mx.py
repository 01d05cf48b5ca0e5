"""Microscaling: recipes with one power-of-two scale per 32 elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from .._checks import is_one_of, shown
from ..quantizers import MXFP4Quantizer, MXFP6Quantizer, MXFP8Quantizer, Quantizer
from ..roles import QuantizerRole
from .base import (
    BACKWARD_TENSOR_TYPES,
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

if TYPE_CHECKING:
    from .delayed import DelayedScaling


@recipe_class
class MXFP8BlockScaling(Recipe):
    """MXFP8: one E8M0 scale per 32 elements.

    Args:
        margin: accepted for compatibility; must be 0, the format has no use for it.
        fp8_format: E4M3 or HYBRID.
        enable_2d_quantization: 32x32 tiles for weights of linear and grouped linear layers.
    """

    _family = "mxfp8"

    margin: int = field(default_factory=lambda: 0)
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def _check(self) -> None:
        super()._check()
        refuse_pure_e5m2(self, self.fp8_format)
        if self.margin != 0:
            raise ValueError(
                f"MXFP8BlockScaling got margin={self.margin}; the format has no margin, leave it 0"
            )

    def resolve(
        self, mode: Mode, roles: Sequence[QuantizerRole]
    ) -> tuple[list[Quantizer], DelayedScaling | None]:
        """Resolve like the base class; a weight whose role names no linear layer gets no tiles."""
        quantizers, state = super().resolve(mode, roles)
        if self.enable_2d_quantization:
            linear = ("linear", "grouped_linear")
            quantizers = [
                quantizer if role.module_type in linear else quantizer.replace(with_2d_quantization=False)
                for quantizer, role in zip(quantizers, roles)
            ]
        return quantizers, state

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        return MXFP8Quantizer(
            fp8_dtype(self.fp8_format, tensor_type),
            with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight",
        )


@recipe_class
class MXFP6BlockScaling(Recipe):
    """MXFP6: six-bit elements, one E8M0 scale per 32 of them.

    The default is E2M3 in the forward and E3M2 in the backward. Every group of 32 has its own scale. Inputs and weights
    have narrow groups and gain more from a third mantissa bit. Groups of gradients span more binades and would lose
    small elements under E2M3 (a factor of 60 between its largest and its smallest value, 448 under E3M2). HYBRID
    chooses the same way between the two FP8 formats.

    Args:
        forward_format: Format.E2M3 or Format.E3M2, of inputs, weights and outputs.
        backward_format: Format.E2M3 or Format.E3M2, of gradients.
        enable_2d_quantization: 32x32 tiles for weights.
    """

    _family = "mxfp6"

    forward_format: Format = Format.E2M3
    backward_format: Format = Format.E3M2
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def _check(self) -> None:
        super()._check()
        for name in ("forward_format", "backward_format"):
            if not is_one_of(getattr(self, name), (Format.E2M3, Format.E3M2)):
                raise ValueError(
                    f"MXFP6BlockScaling got {name}={shown(getattr(self, name))}; use Format.E2M3 or Format.E3M2"
                )

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        backward = tensor_type in BACKWARD_TENSOR_TYPES
        element = self.backward_format if backward else self.forward_format
        return MXFP6Quantizer(
            element.element.dtype,
            with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight",
        )


@recipe_class
class MXFP4BlockScaling(Recipe):
    """MXFP4: E2M1 elements, one E8M0 scale per 32 of them, all rounded to nearest.

    It lacks :class:`NVFP4BlockScaling`'s second scale, rotation and stochastic rounding, which make four-bit training
    work; for gradients, consider ``backward_override``.

    Args:
        enable_2d_quantization: 32x32 tiles for weights.
    """

    _family = "mxfp4"

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def make_quantizer(self, tensor_type: str) -> Quantizer:
        return MXFP4Quantizer(with_2d_quantization=self.enable_2d_quantization and tensor_type == "weight")
