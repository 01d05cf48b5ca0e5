"""An activation times one number per row, differentiable in both.

``parameters`` of ``narrowcast::scaled_act*`` are those of ``narrowcast::act``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._library import always, define
from .activation import named_parameters, output_shape
from .numerics import numerics_for


def _scaled_act(x: Tensor, scale: Tensor, activation: str, parameters: Sequence[float] = ()) -> Tensor:
    named = named_parameters(activation, parameters)
    return numerics_for(x).scaled_activation.forward(x, scale, activation, **named)


scaled_act = define(
    "scaled_act(Tensor x, Tensor scale, str activation, float[] parameters=[]) -> Tensor",
    _scaled_act,
    lambda x, scale, activation, parameters=(): x.new_empty(output_shape(x, activation)),
    lowered=always,
)
"""An activation of ``x`` (*lead, F), or (*lead, 2F) for a gated one, times ``scale`` (lead) -> (*lead, F)."""


def _scaled_act_backward(
    grad: Tensor, x: Tensor, scale: Tensor, activation: str, parameters: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    named = named_parameters(activation, parameters)
    return numerics_for(x).scaled_activation.backward(grad, x, scale, activation, **named)


scaled_act_backward = define(
    "scaled_act_backward(Tensor grad, Tensor x, Tensor scale, str activation, float[] parameters=[]) "
    "-> (Tensor, Tensor)",
    _scaled_act_backward,
    lambda grad, x, scale, *_: (x.new_empty(x.shape), scale.new_empty(scale.shape)),
    lowered=always,
)
"""Gradients (dx, dscale) of :data:`scaled_act`, in the shapes and dtypes of its operands."""
