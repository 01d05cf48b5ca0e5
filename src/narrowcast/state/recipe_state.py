"""``RecipeState``: the quantizers of one module in one direction, and what they keep between steps.

The library's own layers read their quantizers off a ``LinearPlan`` and keep state in buffers; both stand on
``Recipe.resolve`` and on the same renewal. This is the form for code that calls quantizers itself: any optimizer's step
renews its state, unless it is one inside a backward.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor

from .._checks import a_kind, shown
from .._device import default_device
from ..quantizers import Float8Quantizer, Quantizer
from ..recipe import DelayedScaling, Mode, Recipe, first_scale, fp8_max, tensor_type_at
from ..roles import QuantizerRole
from .delayed_scaling import OWNERS, DelayedSlots


class RecipeState:
    """Made by :meth:`create`, or by the class of its recipe, with the same arguments.

    ``recipe``, ``mode`` ("forward" or "backward"), ``roles`` (one per quantizer) and ``device`` never change.
    """

    _family: ClassVar[str] = ""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode is {shown(mode)}; use 'forward' or 'backward'")
        if not isinstance(recipe, Recipe):
            raise ValueError(f"recipe is {a_kind(recipe)}; pass one of narrowcast.recipe's recipes")
        if self._family not in ("", recipe._family):
            raise ValueError(
                f"{type(self).__name__} got {a_kind(recipe)}; RecipeState.create chooses by the recipe"
            )
        if num_quantizers < 1:
            raise ValueError(f"num_quantizers is {num_quantizers}; use at least 1")
        given = [None] * num_quantizers if roles is None else list(roles)
        if len(given) != num_quantizers:
            raise ValueError(f"got {len(given)} roles for num_quantizers={num_quantizers}; give one for each")
        self.recipe = recipe
        self.mode: Mode = mode
        self.roles = [
            QuantizerRole(tensor_type=tensor_type_at(mode, slot)) if role is None else role
            for slot, role in enumerate(given)
        ]
        self.device = default_device() if device is None else torch.device(device)
        self._slots: DelayedSlots | None = None
        OWNERS.add(self)
        delayed = recipe.delayed_scaling()
        if delayed is not None:
            self._keep_new(delayed)

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """Return the state for ``num_quantizers`` tensors, of the class that is named after the recipe's.

        Args:
            recipe: how to quantize.
            mode: "forward": the tensors are input, weight, output of one GEMM after the other; "backward":
                grad_output, grad_input of one after the other. A role that names another of these kinds wins.
            num_quantizers: how many.
            device: where scales and amax histories live; None is the current CUDA device, or the CPU without one.
            roles: one per quantizer, as a custom recipe's factory sees them; None if unknown.
        Raises:
            ValueError: another mode, no recipe, fewer than one quantizer, or as many roles as there are not quantizers.
        """
        family = getattr(recipe, "_family", "")
        kind = next((own for own in RecipeState.__subclasses__() if own._family == family), RecipeState)
        return kind(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    @property
    def num_quantizers(self) -> int:
        """The number of quantizers it makes."""
        return len(self.roles)

    @property
    def scale(self) -> Tensor | None:
        """Scales of delayed quantizers, fp32 (n,); None if the recipe keeps none."""
        return None if self._slots is None else self._slots.scale

    @property
    def amax_history(self) -> Tensor | None:
        """Amax of past steps of delayed quantizers, fp32 (L, n). None if there is none."""
        return None if self._slots is None else self._slots.amax_history

    @property
    def amax(self) -> Tensor | None:
        """Amax that the current step has collected, fp32 (n,). None if there is none."""
        return None if self._slots is None else self._slots.amax

    def make_quantizers(self) -> list[Quantizer]:
        """Return one quantizer per tensor; delayed ones are views of :attr:`scale` and :attr:`amax`.

        Raises:
            ValueError: a custom recipe's factory returned None, or requests that differ.
            TypeError: it returned something else than a quantizer or a request.
        """
        quantizers, delayed = self.recipe.resolve(self.mode, self.roles)
        if delayed is None:
            return quantizers
        if self._slots is None or self._slots.recipe != delayed:
            self._keep_new(delayed)
        return [self._with_state(quantizer, slot) for slot, quantizer in enumerate(quantizers)]

    def delayed_slots(self) -> list[DelayedSlots]:
        """Return the slots to renew."""
        return [] if self._slots is None else [self._slots]

    def follows(self, stepped: Set[int], outside: bool) -> bool:
        """Return whether an optimizer's step renews it: any outside of a backward, for it has no parameters."""
        return outside

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Continue with the scales and histories of ``other``, which this state replaces.

        Quantizers that either of the two made before keep the tensors they were made with.

        Returns:
            False, and nothing changes, where recipe (by value), mode, number of quantizers or device differ.
        """
        ours = (self.recipe, self.mode, self.num_quantizers, self.device)
        if ours != (other.recipe, other.mode, other.num_quantizers, other.device):
            return False
        if other._slots is not None:
            self._slots = other._slots
        return True

    def _with_state(self, quantizer: Quantizer, slot: int) -> Quantizer:
        if self._slots is None or quantizer.with_amax_reduction or not quantizer._is_delayed():
            return quantizer
        at = slice(slot, slot + 1)
        return Float8Quantizer(
            self._slots.scale[at],
            self._slots.amax[at],
            quantizer.dtype,  # type: ignore[attr-defined]
            rowwise=quantizer.rowwise_usage,
            columnwise=quantizer.columnwise_usage,
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _keep_new(self, delayed: DelayedScaling) -> None:
        shape, first = (self.num_quantizers,), first_scale(delayed, self.mode)
        scale = torch.full(shape, first, dtype=torch.float32, device=self.device)
        history = scale.new_zeros(delayed.amax_history_len, self.num_quantizers)
        largest = fp8_max(delayed, self.mode)
        self._slots = DelayedSlots(delayed, (largest, largest), scale, history, torch.zeros_like(scale))


class DelayedScalingRecipeState(RecipeState):
    """State of ``DelayedScaling``."""

    _family = "delayed"


class Float8CurrentScalingRecipeState(RecipeState):
    """The state of ``Float8CurrentScaling``, which keeps none."""

    _family = "current"


class MXFP8BlockScalingRecipeState(RecipeState):
    """The state of ``MXFP8BlockScaling``, which keeps none."""

    _family = "mxfp8"


class Float8BlockScalingRecipeState(RecipeState):
    """The state of ``Float8BlockScaling``, which keeps none."""

    _family = "float8_block"


class NVFP4BlockScalingRecipeState(RecipeState):
    """The state of ``NVFP4BlockScaling``, which keeps none."""

    _family = "nvfp4"


class CustomRecipeState(RecipeState):
    """State of a ``CustomRecipe``: of what its factory requests with delayed scaling."""

    _family = "custom"
