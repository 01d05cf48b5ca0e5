"""``CustomRecipe``: quantizers from a factory of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from .._checks import shown
from .._tracing import can_check
from ..quantizers import Quantizer
from ..roles import QuantizerRole
from .base import (
    BackwardOverride,
    Format,
    MMParams,
    Mode,
    Recipe,
    SavedActivations,
    flag_field,
    recipe_class,
    tensor_type_at,
)
from .delayed import DelayedScaling, DelayedScalingRequest, delayed_quantizer
from .names import recipe_from_name


@recipe_class
class CustomRecipe(Recipe):
    """A recipe of your own quantizers.

    Args:
        qfactory: called with a :class:`QuantizerRole`, returns a quantizer for that tensor.
        fp8_format: for delayed-scaling requests.
        quantization_alignment: row multiple for grouped GEMMs, positive.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation per GEMM.
    Raises:
        ValueError: the factory is not callable, the alignment is not positive, or, at the first use of a role, the
            factory returns None.
        TypeError: at the first use of a role, the factory returns something other than a quantizer.
    """

    _family = "custom"

    _plans_by_name = True

    qfactory: Callable[[QuantizerRole], Any] | None = None
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    quantization_alignment: int = field(default_factory=lambda: 128)
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(False))
    fp8_gemm_dgrad: MMParams = field(default_factory=lambda: MMParams(True))
    fp8_gemm_wgrad: MMParams = field(default_factory=lambda: MMParams(True))
    emulate: bool = flag_field("EMULATE")
    saved_activations: SavedActivations = None

    def _check(self) -> None:
        super()._check()
        if not callable(self.qfactory):
            raise ValueError(f"CustomRecipe needs a callable qfactory(role), got {shown(self.qfactory)}")
        if can_check():
            self._check_factory()
        if self.quantization_alignment <= 0:
            raise ValueError(
                f"quantization_alignment is {self.quantization_alignment}; use a positive number"
            )

    def _check_factory(self) -> None:
        try:
            inspect.signature(self.qfactory).bind(None)  # type: ignore[arg-type]
        except ValueError:  # of what is written in C, which has none
            pass
        except TypeError as error:
            raise TypeError(
                f"qfactory is {shown(self.qfactory)}, which cannot be called with one argument ({error}); write a "
                "function of a QuantizerRole"
            ) from None

    def resolve(
        self, mode: Mode, roles: Sequence[QuantizerRole]
    ) -> tuple[list[Quantizer], DelayedScaling | None]:
        """Return quantizers that the factory makes, one per role, and what renews the state of those it requested.

        Raises:
            ValueError: the factory returned None, or requests that differ.
            TypeError: it returned something else than a quantizer or a request, or a quantizer with a ``qgemm``.
        """
        results = [self._result_for(role) for role in roles]
        requests = [request for request in results if isinstance(request, DelayedScalingRequest)]
        if any(request != requests[0] for request in requests):
            raise ValueError(
                f"the delayed-scaling requests of one module and direction must be equal, got {requests}"
            )
        kinds = [tensor_type_at(mode, slot, role) for slot, role in enumerate(roles)]
        quantizers = [
            delayed_quantizer(result, kind) if isinstance(result, DelayedScalingRequest) else result
            for result, kind in zip(results, kinds)
        ]
        return quantizers, requests[0] if requests else None

    def _result_for(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """Return the factory's result for a role, checked."""
        result = self.qfactory(role)  # type: ignore[misc]
        if result is None:
            raise ValueError(
                f"qfactory returned None for {role}; return an IdentityQuantizer to leave it alone"
            )
        # in a traced call the compiler stands something else in for the quantizer it has just made
        if can_check() and not isinstance(result, (Quantizer, DelayedScalingRequest)):
            raise TypeError(
                f"qfactory returned {type(result).__qualname__} for {role}; return a Quantizer or request"
            )
        if can_check() and hasattr(result, "qgemm"):
            raise TypeError(
                f"qfactory returned {type(result).__qualname__} for {role}, whose qgemm no layer calls; return a "
                "quantizer whose codes are decoded for the GEMM"
            )
        return result


def get_align_size_for_quantization(recipe: Recipe | str) -> int:
    """Return the row multiple that the GEMMs of a recipe, or of the recipe with this name, need from each group.

    Raises:
        TypeError, ValueError: as for :func:`recipe_from_name`.
    """
    if not isinstance(recipe, Recipe):
        recipe = recipe_from_name(recipe)
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    if recipe._family in ("mxfp8", "mxfp6", "mxfp4"):
        return 32
    return 128 if recipe.nvfp4() else 16
