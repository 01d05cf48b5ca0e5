"""Activations, alone and fused with the quantization of their result or of their gradient.

``parameters`` of ``narrowcast::act*`` are those of the activation, in the order of its record in
``reference.activation.ACTIVATIONS``; none means the defaults. Fused results equal the unfused ones, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantize import describe, describe_slots, encode_slots, encode_source, encode_with_sums
from .quantizer_value import QuantizerValue


def named_parameters(activation: str, parameters: Sequence[float]) -> dict[str, float]:
    """The parameters of an activation by name.

    Raises:
        ValueError: an unknown activation, or another number of parameters than it has.
    """
    names = list(reference.activation.checked(activation, (2,)).params)
    if parameters and len(parameters) != len(names):
        raise ValueError(f"{activation} takes {len(names)} parameters {names}, got {list(parameters)}")
    return dict(zip(names, parameters)) if parameters else {}


def output_shape(x: Tensor, activation: str) -> tuple[int, ...]:
    """Shape of an activation of ``x``.

    Raises:
        ValueError: an unknown activation, or an odd last dim of a gated one.
    """
    gated = reference.activation.checked(activation, x.shape).gated
    return (*x.shape[:-1], x.shape[-1] // 2) if gated else tuple(x.shape)


def _act(x: Tensor, activation: str, parameters: Sequence[float] = ()) -> Tensor:
    named = named_parameters(activation, parameters)
    return numerics_for(x).activation.forward(x, activation, **named)


def _act_fake(x: Tensor, activation: str, parameters: Sequence[float] = ()) -> Tensor:
    return x.new_empty(output_shape(x, activation))


act = define("act(Tensor x, str activation, float[] parameters=[]) -> Tensor", _act, _act_fake)
"""An activation of ``x`` (*lead, F), or (*lead, 2F) for a gated one whose gate is the first half -> (*lead, F)."""


def _act_backward(
    grad: Tensor,
    x: Tensor,
    activation: str,
    parameters: Sequence[float] = (),
) -> Tensor:
    named = named_parameters(activation, parameters)
    return numerics_for(x).activation.backward(grad, x, activation, **named)


def _act_backward_fake(
    grad: Tensor,
    x: Tensor,
    activation: str,
    parameters: Sequence[float] = (),
) -> Tensor:
    return x.new_empty(x.shape)


act_backward = define(
    "act_backward(Tensor grad, Tensor x, str activation, float[] parameters=[]) -> Tensor",
    _act_backward,
    _act_backward_fake,
)
"""Gradient of :data:`act` with respect to ``x``, in the shape and dtype of ``x``."""


def _act_quantize(
    x: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    parameters: Sequence[float] = (),
) -> list[Tensor]:
    numerics = numerics_for(x)
    named = named_parameters(activation, parameters)
    return encode_source(numerics, numerics.sources.activation(x, activation, **named), quantizer, seed)


def _act_quantize_fake(
    x: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    parameters: Sequence[float] = (),
) -> list[Tensor]:
    return describe(x, output_shape(x, activation), x.dtype, quantizer)


act_quantize = define(
    f"act_quantize(Tensor x, str activation, {QUANTIZER} quantizer, Tensor? seed=None, float[] parameters=[]) "
    "-> Tensor[]",
    _act_quantize,
    _act_quantize_fake,
)
"""Quantize the activation of ``x``; the activation itself never reaches memory where the format allows it."""


def _act_quantize_delayed(
    x: Tensor,
    activation: str,
    scale: Tensor,
    amax: Tensor,
    quantizer: QuantizerValue,
    parameters: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    numerics = numerics_for(x)
    named = named_parameters(activation, parameters)
    source = numerics.sources.activation(x, activation, **named)
    return encode_slots(numerics, source, scale, amax, quantizer)


def _act_quantize_delayed_fake(
    x: Tensor,
    activation: str,
    scale: Tensor,
    amax: Tensor,
    quantizer: QuantizerValue,
    parameters: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    return describe_slots(x, output_shape(x, activation), x.dtype, quantizer)


act_quantize_delayed = define(
    f"act_quantize_delayed(Tensor x, str activation, Tensor scale, Tensor(a!) amax, {QUANTIZER} quantizer, "
    "float[] parameters=[]) -> (Tensor, Tensor, Tensor)",
    _act_quantize_delayed,
    _act_quantize_delayed_fake,
)
"""As :data:`act_quantize` with the scale and amax slots of delayed scaling; outputs as ``quantize_delayed``."""


def _sums_like(x: Tensor, present: bool) -> Tensor:
    return x.new_empty(x.shape[-1:] if present else 0, dtype=torch.float32)


def _act_backward_quantize(
    grad: Tensor,
    x: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    parameters: Sequence[float] = (),
    column_sums: bool = True,
) -> list[Tensor]:
    numerics = numerics_for(x)
    named = named_parameters(activation, parameters)
    source = numerics.sources.activation_backward(grad, x, activation, column_sums=column_sums, **named)
    return (encode_with_sums if column_sums else encode_source)(numerics, source, quantizer, seed)


def _act_backward_quantize_fake(
    grad: Tensor,
    x: Tensor,
    activation: str,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    parameters: Sequence[float] = (),
    column_sums: bool = True,
) -> list[Tensor]:
    described = describe(x, tuple(x.shape), x.dtype, quantizer)
    return [*described, _sums_like(x, True)] if column_sums else described


act_backward_quantize = define(
    f"act_backward_quantize(Tensor grad, Tensor x, str activation, {QUANTIZER} quantizer, Tensor? seed=None, "
    "float[] parameters=[], bool column_sums=True) -> Tensor[]",
    _act_backward_quantize,
    _act_backward_quantize_fake,
)
"""Quantize the gradient of an activation; last comes its sum over all but the last dim, fp32: a bias gradient.

Without ``column_sums`` the sum is not there.
"""


def _act_backward_quantize_delayed(
    grad: Tensor,
    x: Tensor,
    activation: str,
    scale: Tensor,
    amax: Tensor,
    quantizer: QuantizerValue,
    parameters: Sequence[float] = (),
    column_sums: bool = True,
) -> tuple[Tensor, ...]:
    numerics = numerics_for(x)
    named = named_parameters(activation, parameters)
    source = numerics.sources.activation_backward(grad, x, activation, column_sums=column_sums, **named)
    slots = encode_slots(numerics, source, scale, amax, quantizer)
    return (*slots, numerics.sources.column_sum(source) if column_sums else _sums_like(x, False))


def _act_backward_quantize_delayed_fake(
    grad: Tensor,
    x: Tensor,
    activation: str,
    scale: Tensor,
    amax: Tensor,
    quantizer: QuantizerValue,
    parameters: Sequence[float] = (),
    column_sums: bool = True,
) -> tuple[Tensor, ...]:
    return (*describe_slots(x, tuple(x.shape), x.dtype, quantizer), _sums_like(x, column_sums))


act_backward_quantize_delayed = define(
    "act_backward_quantize_delayed(Tensor grad, Tensor x, str activation, Tensor scale, Tensor(a!) amax, "
    f"{QUANTIZER} quantizer, float[] parameters=[], bool column_sums=True) -> (Tensor, Tensor, Tensor, Tensor)",
    _act_backward_quantize_delayed,
    _act_backward_quantize_delayed_fake,
)
"""As :data:`act_backward_quantize` with the scale and amax slots of delayed scaling; an absent sum is empty."""
