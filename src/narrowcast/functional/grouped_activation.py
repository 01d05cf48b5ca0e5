"""Gated activations of groups of rows, and their gradients, quantized on the way to memory: group by group.

Results equal ``act`` or ``act_backward`` followed by ``grouped_quantize``, bit for bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._library import QUANTIZER, define
from ._producers import STATE
from .activation import named_parameters, output_shape
from .grouped_quantize import describe_rows, encode_groups
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

State = Tensor | None


def _encode_activation(
    x: Tensor,
    splits: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    layout: str,
    parameters: list[float],
    seed: State = None,
    scale: State = None,
    amax: State = None,
) -> list[Tensor]:
    numerics = numerics_for(x)
    source = numerics.fused_producers.activation(x, activation, **named_parameters(activation, parameters))
    return encode_groups([source], splits, quantizer, layout, seed, scale, amax, False, numerics, True)


def _activation_fake(
    x: Tensor, splits: Tensor, activation: str, quantizer: QuantizerValue, layout: str, *_: Any
) -> list[Tensor]:
    return describe_rows(x, *output_shape(x, activation), splits, quantizer, layout, x.dtype)  # type: ignore[arg-type]


grouped_act_quantize = define(
    f"grouped_act_quantize(Tensor x, Tensor splits, str activation, {QUANTIZER} quantizer, str layout, "
    f"float[] parameters, {STATE}) -> Tensor[]",
    _encode_activation,
    _activation_fake,
    lowered=lambda x, splits, activation, quantizer, layout, *_: layout != "split",
)
"""Quantize a gated activation of groups of rows (T, 2F); arguments as of :data:`act_quantize` and
:data:`grouped_quantize`.
"""


def _encode_gradient(
    grad: Tensor,
    x: Tensor,
    splits: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    layout: str,
    parameters: list[float],
    seed: State = None,
    scale: State = None,
    amax: State = None,
) -> list[Tensor]:
    numerics = numerics_for(x)
    named = named_parameters(activation, parameters)
    source = numerics.fused_producers.activation_backward(grad, x, activation, **named)
    return encode_groups([source], splits, quantizer, layout, seed, scale, amax, False, numerics, True)


def _gradient_fake(
    grad: Tensor, x: Tensor, splits: Tensor, activation: str, quantizer: QuantizerValue, layout: str, *_: Any
) -> list[Tensor]:
    return describe_rows(x, *x.shape, splits, quantizer, layout, x.dtype)  # type: ignore[arg-type]


grouped_act_backward_quantize = define(
    f"grouped_act_backward_quantize(Tensor grad, Tensor x, Tensor splits, str activation, {QUANTIZER} quantizer, "
    f"str layout, float[] parameters, {STATE}) -> Tensor[]",
    _encode_gradient,
    _gradient_fake,
    lowered=lambda grad, x, splits, activation, quantizer, layout, *_: layout != "split",
)
"""Quantize the gradient (T, 2F) of a gated activation of ``x``, given that of its result (T, F)."""
