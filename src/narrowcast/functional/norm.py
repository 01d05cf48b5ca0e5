"""LayerNorm and RMSNorm, alone and fused with the quantization of their result or of their gradient.

``narrowcast::norm*`` take ``normalization`` ("LayerNorm" or "RMSNorm") and, with ``residual``, normalize the sum
``x + residual`` rounded to the dtype of ``x``, which they return. What a call does not have - the mean of RMSNorm, the
sum without a residual - is returned as an empty tensor. Fused results equal the unfused ones, bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantize import describe, describe_slots, encode_slots, encode_source
from .quantizer_value import QuantizerValue

_INPUTS = (
    "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
    "str normalization, bool zero_centered_gamma"
)
_GRADIENTS = (
    "Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool zero_centered_gamma, Tensor? residual_grad"
)


Inputs = tuple[Any, ...]
"""The seven arguments that ``_INPUTS`` names, or the seven of ``_GRADIENTS``: they travel together."""


def _statistics(
    numerics: ModuleType, inputs: Inputs, with_amax: bool = False
) -> tuple[Any, tuple[Tensor, ...]]:
    """The normalized matrix as a source, and (mean, rstd, sum)."""
    x, residual, weight, bias, eps, normalization, zero_centered_gamma = inputs
    source, mean, rstd, summed = numerics.sources.normalized(
        x,
        residual,
        weight,
        bias,
        eps=eps,
        normalization=normalization,
        zero_centered_gamma=zero_centered_gamma,
        with_amax=with_amax,
    )
    return source, (_or_absent(mean, rstd), rstd, _or_absent(summed, x))


def _or_absent(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _statistics_fake(inputs: Inputs) -> tuple[Tensor, ...]:
    x, residual, _, _, _, normalization, _ = inputs
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = rstd.new_empty(rows if normalization == "LayerNorm" else 0)
    return mean, rstd, x.new_empty(0 if residual is None else x.shape)


def _norm(*inputs: Any) -> tuple[Tensor, ...]:
    numerics = numerics_for(inputs[0])
    source, statistics = _statistics(numerics, inputs)
    return (numerics.sources.materialize(source), *statistics)


def _norm_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return (inputs[0].new_empty(inputs[0].shape), *_statistics_fake(inputs))


norm = define(f"norm({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", _norm, _norm_fake)
"""Normalize over the last dim: (y, mean, rstd, sum); y and sum (*lead, K) in the dtype of ``x``, the others fp32."""


def _norm_quantize(*arguments: Any) -> list[Tensor]:
    inputs, quantizer, seed = _with_quantizer(arguments)
    numerics = numerics_for(inputs[0])
    source, statistics = _statistics(numerics, inputs, quantizer._needs_amax)
    return [*encode_source(numerics, source, quantizer, seed), *statistics]


def _norm_quantize_fake(*arguments: Any) -> list[Tensor]:
    inputs, quantizer, _ = _with_quantizer(arguments)
    return [*_described(inputs[0], quantizer), *_statistics_fake(inputs)]


def _with_quantizer(arguments: tuple[Any, ...]) -> tuple[Inputs, QuantizerValue, Tensor | None]:
    """(inputs, quantizer, seed): an operator's implementation gets no argument that has its default."""
    return arguments[:7], arguments[7], arguments[8] if len(arguments) > 8 else None


def _described(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    return describe(x, tuple(x.shape), x.dtype, quantizer)


norm_quantize = define(
    f"norm_quantize({_INPUTS}, {QUANTIZER} quantizer, Tensor? seed=None) -> Tensor[]",
    _norm_quantize,
    _norm_quantize_fake,
)
"""Normalize and quantize: the quantizer's buffers, then mean, rstd, sum; y itself reaches memory only if it must."""


def _norm_quantize_delayed(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, scale, amax, quantizer = arguments
    numerics = numerics_for(inputs[0])
    source, statistics = _statistics(numerics, tuple(inputs))
    return (*encode_slots(numerics, source, scale, amax, quantizer), *statistics)


def _norm_quantize_delayed_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, _, _, quantizer = arguments
    x = inputs[0]
    return (*describe_slots(x, tuple(x.shape), x.dtype, quantizer), *_statistics_fake(tuple(inputs)))


norm_quantize_delayed = define(
    f"norm_quantize_delayed({_INPUTS}, Tensor scale, Tensor(a!) amax, {QUANTIZER} quantizer) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_quantize_delayed,
    _norm_quantize_delayed_fake,
)
"""As :data:`norm_quantize` with the slots of delayed scaling: (data, transpose, scale_inv, mean, rstd, sum)."""


def _gradients(numerics: ModuleType, inputs: Inputs) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The input gradient as a source, and (dweight, dbias)."""
    grad, x, weight, mean, rstd, zero_centered_gamma, residual_grad = inputs
    present = mean if mean.numel() == rstd.numel() else None
    c1, c2, dweight, dbias = numerics.norm.gradient_statistics(
        grad, x, weight, present, rstd, zero_centered_gamma=zero_centered_gamma
    )
    source = numerics.sources.norm_backward(
        grad,
        x,
        weight,
        present,
        rstd,
        c1,
        c2,
        zero_centered_gamma=zero_centered_gamma,
        residual_grad=residual_grad,
    )
    return source, (dweight.to(weight.dtype), _or_absent(dbias, dweight).to(weight.dtype))


def _gradients_fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    _, _, weight, mean, rstd, _, _ = inputs
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape if mean.shape == rstd.shape else 0)


def _norm_backward(*inputs: Any) -> tuple[Tensor, ...]:
    numerics = numerics_for(inputs[1])
    source, parameters = _gradients(numerics, inputs)
    return (numerics.sources.materialize(source), *parameters)


def _norm_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return (inputs[1].new_empty(inputs[1].shape), *_gradients_fake(inputs))


norm_backward = define(
    f"norm_backward({_GRADIENTS}) -> (Tensor, Tensor, Tensor)", _norm_backward, _norm_backward_fake
)
"""Gradients (dx, dweight, dbias) of :data:`norm`; ``residual_grad`` is added to dx before its one rounding.

``x``: what was normalized, that is the sum where there was a residual. ``mean``: empty for RMSNorm, whose dbias is
empty too.
"""


def _norm_backward_quantize(*arguments: Any) -> list[Tensor]:
    inputs, quantizer, seed = _with_quantizer(arguments)
    numerics = numerics_for(inputs[1])
    source, parameters = _gradients(numerics, inputs)
    return [*encode_source(numerics, source, quantizer, seed), *parameters]


def _norm_backward_quantize_fake(*arguments: Any) -> list[Tensor]:
    inputs, quantizer, _ = _with_quantizer(arguments)
    return [*_described(inputs[1], quantizer), *_gradients_fake(inputs)]


norm_backward_quantize = define(
    f"norm_backward_quantize({_GRADIENTS}, {QUANTIZER} quantizer, Tensor? seed=None) -> Tensor[]",
    _norm_backward_quantize,
    _norm_backward_quantize_fake,
)
"""As :data:`norm_backward`, with dx quantized: the quantizer's buffers, then dweight and dbias."""


def _norm_backward_quantize_delayed(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, scale, amax, quantizer = arguments
    numerics = numerics_for(inputs[1])
    source, parameters = _gradients(numerics, tuple(inputs))
    return (*encode_slots(numerics, source, scale, amax, quantizer), *parameters)


def _norm_backward_quantize_delayed_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, _, _, quantizer = arguments
    x = inputs[1]
    return (*describe_slots(x, tuple(x.shape), x.dtype, quantizer), *_gradients_fake(tuple(inputs)))


norm_backward_quantize_delayed = define(
    f"norm_backward_quantize_delayed({_GRADIENTS}, Tensor scale, Tensor(a!) amax, {QUANTIZER} quantizer) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_backward_quantize_delayed,
    _norm_backward_quantize_delayed_fake,
)
"""As :data:`norm_backward_quantize` with the slots of delayed scaling."""
