"""Activations, alone and fused with the quantization of their result or of their gradient.

``parameters`` of ``narrowcast::act*`` are those of the activation, in the order of its record in
``_activations.ACTIVATIONS``; none means the defaults. Fused results equal the unfused ones, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from .._activations import checked
from ._producers import Producer, define_plain, define_quantizing


def named_parameters(activation: str, parameters: Sequence[float]) -> dict[str, float]:
    """Return the parameters of an activation by name.

    Raises:
        ValueError: an unknown activation, or another number of parameters than it has.
    """
    names = list(checked(activation, (2,)).params)
    if parameters and len(parameters) != len(names):
        raise ValueError(f"{activation} takes {len(names)} parameters {names}, got {list(parameters)}")
    return dict(zip(names, parameters)) if parameters else {}


def output_shape(x: Tensor, activation: str) -> tuple[int, ...]:
    """Return the shape of an activation of ``x``.

    Raises:
        ValueError: an unknown activation, or an odd last dim of a gated one.
    """
    gated = checked(activation, x.shape).gated
    return (*x.shape[:-1], x.shape[-1] // 2) if gated else tuple(x.shape)


def _activated(
    numerics: ModuleType, wanted: str, x: Tensor, activation: str, parameters: Sequence[float]
) -> tuple[Any, tuple[Tensor, ...]]:
    return numerics.fused_producers.activation(x, activation, **named_parameters(activation, parameters)), ()


_ACT = Producer(
    name="act",
    inputs=("Tensor x", "str activation"),
    like=0,
    source=_activated,
    shape=lambda x, activation, parameters: output_shape(x, activation),
    options={"float[] parameters": []},
)

act = define_plain(_ACT)
"""An activation of ``x`` (*lead, F), or (*lead, 2F) for a gated one whose gate is the first half -> (*lead, F)."""

act_quantize = define_quantizing(_ACT)
"""Quantize the activation of ``x``; the activation itself never reaches memory where the format allows it."""


def _gradient(
    numerics: ModuleType,
    wanted: str,
    grad: Tensor,
    x: Tensor,
    activation: str,
    parameters: Sequence[float],
    column_sums: bool = False,
) -> tuple[Any, tuple[Tensor, ...]]:
    named = named_parameters(activation, parameters)
    return numerics.fused_producers.activation_backward(
        grad, x, activation, column_sums=column_sums, **named
    ), ()


_ACT_BACKWARD = Producer(
    name="act_backward",
    inputs=("Tensor grad", "Tensor x", "str activation"),
    like=1,
    source=_gradient,
    shape=lambda grad, x, *_: tuple(x.shape),
    options={"float[] parameters": []},
    sums="asked",
)

act_backward = define_plain(_ACT_BACKWARD)
"""Gradient of :data:`act` with respect to ``x``, in the shape and dtype of ``x``."""

act_backward_quantize = define_quantizing(_ACT_BACKWARD)
"""Quantize the gradient of an activation; last comes its sum over all but the last dim, fp32: a bias gradient.

Without ``column_sums`` the sum is not there.
"""
