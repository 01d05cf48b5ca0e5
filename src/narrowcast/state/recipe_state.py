"""``RecipeState``: the quantizers of one module in one direction, and what they keep between steps.

The library's own modules get their quantizers from ``Recipe.linear_handles`` and keep the state of both directions in
a ``DelayedScalingState``; both stand on ``Recipe.resolve`` and on the same update. This is the form for code that
calls quantizers itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .._device import default_device
from ..quantizers import Float8Quantizer, Quantizer
from ..recipe import DelayedScaling, Mode, Recipe, tensor_type_at
from ..roles import QuantizerRole
from .delayed_scaling import DelayedBuffers, register_delayed_state


class RecipeState:
    """Made by :meth:`create`.

    ``recipe``, ``mode`` ("forward" or "backward"), ``roles`` (one per quantizer) and ``device`` never change.
    """

    def __init__(self, recipe: Recipe, mode: Mode, roles: list[QuantizerRole], device: torch.device) -> None:
        self.recipe, self.roles, self.device = recipe, roles, device
        self.mode: Mode = mode
        self._buffers: DelayedBuffers | None = None
        self._registration: weakref.finalize | None = None
        managed = recipe.delayed_scaling()
        if managed is not None:
            self._hold_new(managed)

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """State for ``num_quantizers`` tensors.

        Args:
            recipe: how to quantize.
            mode: "forward": the tensors are input, weight, output of one GEMM after the other; "backward":
                grad_output, grad_input of one after the other. A role that names another of these kinds wins.
            num_quantizers: how many.
            device: where scales and amax histories live; None is the current CUDA device, or the CPU without one.
            roles: one per quantizer, as a custom recipe's factory sees them; None where unknown.
        Raises:
            ValueError: another mode, no recipe, fewer than one quantizer, or as many roles as there are not quantizers.
        """
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode is {mode!r}; use 'forward' or 'backward'")
        if not isinstance(recipe, Recipe):
            raise ValueError(f"recipe is a {type(recipe).__name__}; pass one of narrowcast.recipe's recipes")
        if num_quantizers < 1:
            raise ValueError(f"num_quantizers is {num_quantizers}; use at least 1")
        given = [None] * num_quantizers if roles is None else list(roles)
        if len(given) != num_quantizers:
            raise ValueError(f"got {len(given)} roles for num_quantizers={num_quantizers}; give one for each")
        known = [
            QuantizerRole(tensor_type=tensor_type_at(mode, slot)) if role is None else role
            for slot, role in enumerate(given)
        ]
        return RecipeState(recipe, mode, known, default_device() if device is None else torch.device(device))

    @property
    def num_quantizers(self) -> int:
        """How many quantizers it makes."""
        return len(self.roles)

    @property
    def scale(self) -> Tensor | None:
        """Scales of delayed quantizers, fp32 (n,); None where the recipe keeps none."""
        return None if self._buffers is None else self._buffers.scale

    @property
    def amax_history(self) -> Tensor | None:
        """Amax of delayed quantizers, fp32 (L, n); row 0 collects the current step. None where there is none."""
        return None if self._buffers is None else self._buffers.amax_history

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per tensor; delayed ones are views of :attr:`scale` and :attr:`amax_history`.

        Raises:
            ValueError: a custom recipe's factory returned None, or requests that differ. TypeError: it returned
            something else than a quantizer or a request.
        """
        quantizers, managed = self.recipe.resolve(self.mode, self.roles)
        if managed is None:
            return quantizers
        if self._buffers is None or self._buffers.recipe != managed:
            self._hold_new(managed)
        return [self._with_state(quantizer, slot) for slot, quantizer in enumerate(quantizers)]

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Go on with the scales and histories of ``other``, which this state replaces.

        Quantizers that either of the two made before keep the tensors they were made with.

        Returns:
            False, and nothing changes, where recipe (by value), mode, number of quantizers or device differ.
        """
        ours = (self.recipe, self.mode, self.num_quantizers, self.device)
        if ours != (other.recipe, other.mode, other.num_quantizers, other.device):
            return False
        if other._buffers is not None:
            self._hold(other._buffers)
        return True

    def _with_state(self, quantizer: Quantizer, slot: int) -> Quantizer:
        if not quantizer._is_delayed() or self._buffers is None:
            return quantizer
        at = slice(slot, slot + 1)
        return Float8Quantizer(
            self._buffers.scale[at],
            self._buffers.amax_history[0, at],
            quantizer.dtype,  # type: ignore[attr-defined]
            rowwise=quantizer.rowwise_usage,
            columnwise=quantizer.columnwise_usage,
        )

    def _hold_new(self, managed: DelayedScaling) -> None:
        self._hold(DelayedBuffers(managed, self.mode, self.num_quantizers, self.device))

    def _hold(self, buffers: DelayedBuffers) -> None:
        if self._registration is not None:
            self._registration()
        self._buffers = buffers
        self._registration = register_delayed_state(self, buffers)
