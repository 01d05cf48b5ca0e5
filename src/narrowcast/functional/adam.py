"""A step of Adam on many parameters of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._library import QUANTIZER, always, define
from ._producers import encode
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

_OPTIONS = ("betas", "eps", "weight_decay", "decoupled", "bias_correction")
_NUMBERS = "float lr, SymInt count, float[] betas, float eps, float weight_decay, bool decoupled, bool bias_correction"


def _adam(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    beside: list[Tensor],
    ranges: list[Tensor],
    stored_lr: Tensor | None,
    stored_count: Tensor | None,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    count: int,
    *numbers: Any,
) -> None:
    *options, stochastic = numbers
    numerics_for(weights[0]).adam.step(
        weights,
        grads,
        first,
        second,
        beside,
        ranges,
        lr=lr if stored_lr is None else stored_lr,
        count=count if stored_count is None else stored_count,
        inv_scale=inv_scale,
        found_inf=found_inf,
        stochastic=stochastic,
        **dict(zip(_OPTIONS, options, strict=True)),
    )


_adam_ = define(
    "adam_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] beside, "
    "Tensor(e!)[] ranges, Tensor? stored_lr, Tensor? stored_count, Tensor? inv_scale, Tensor? found_inf, "
    f"{_NUMBERS}, bool stochastic) -> ()",
    _adam,
    lambda *_: None,
    dissolved=always,
)


def adam_(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    beside: list[Tensor],
    ranges: list[Tensor] | None = None,
    *,
    lr: float | Tensor,
    count: int | Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    stochastic: bool = False,
) -> None:
    """Step weights and moments in place, and write what stands beside the weights, as ``reference.adam.step``.

    Rate and count may be tensors, which are read on the weights' device.
    """
    if not weights:
        return
    stored = _tensors_among(weights[0].device, lr, count, inv_scale, found_inf)
    _adam_(
        weights,
        grads,
        first,
        second,
        beside,
        ranges or [],
        *stored,
        *_numbers(lr, count, betas, eps, weight_decay),
        decoupled,
        bias_correction,
        stochastic,
    )


def _tensors_among(device: torch.device, *values: Any) -> list[Tensor | None]:
    return [x.to(device) if isinstance(x, Tensor) else None for x in values]


def _numbers(
    lr: float | Tensor, count: int | Tensor, betas: Sequence[float], eps: float, weight_decay: float
) -> tuple[Any, ...]:
    """Return what operators take as numbers; a rate or count that is a tensor has zero there."""
    rates = 0.0 if isinstance(lr, Tensor) else float(lr), 0 if isinstance(count, Tensor) else count
    return *rates, list(betas), float(eps), float(weight_decay)


def _adam_quantize(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    beside: list[Tensor],
    buffers: list[Tensor],
    quantizer: QuantizerValue,
    stored_lr: Tensor | None,
    stored_count: Tensor | None,
    lr: float,
    count: int,
    *options: Any,
) -> None:
    numerics, given = numerics_for(weights[0]), dict(zip(_OPTIONS, options, strict=True))
    corrected = given["eps"], given["weight_decay"], given["bias_correction"]
    rates = (lr if stored_lr is None else stored_lr), (count if stored_count is None else stored_count)
    factors = numerics.adam.factors(*rates, given["betas"], *corrected, weights[0].device)
    each = len(buffers) // len(weights)
    for i, stepped in enumerate(zip(weights, grads, first, second)):
        kept = buffers[i * each : (i + 1) * each]
        x = numerics.adam.source(
            *stepped,
            beside[i] if beside else None,
            factors,
            betas=given["betas"],
            weight_decay=given["weight_decay"],
            decoupled=given["decoupled"],
            out=kept,
        )
        if not quantizer._takes_sources:
            x = numerics.fused_producers.materialize(x)
        for old, made in zip(kept, encode(x, quantizer, None, None, None, numerics), strict=True):
            if made is not old:
                old.copy_(made)


_adam_quantize_ = define(
    "adam_quantize_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, "
    f"Tensor(d!)[] beside, Tensor(e!)[] buffers, {QUANTIZER} quantizer, "
    f"Tensor? stored_lr, Tensor? stored_count, {_NUMBERS}) -> ()",
    _adam_quantize,
    lambda *_: None,
    dissolved=always,
)


def adam_quantize_(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    beside: list[Tensor],
    buffers: list[Tensor],
    quantizer: QuantizerValue,
    *,
    lr: float | Tensor,
    count: int | Tensor,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """:func:`adam_`, and write the quantized parameters from the same pass.

    Args:
        weights: matrices, contiguous as all that is stepped with them.
        beside: as in :func:`adam_`.
        buffers: what the quantizer makes of each parameter, one after the other; they are written in place.
        quantizer: of all of them, which rounds to nearest.
    """
    stored = _tensors_among(weights[0].device, lr, count)
    _adam_quantize_(
        weights,
        grads,
        first,
        second,
        beside,
        buffers,
        quantizer,
        *stored,
        *_numbers(lr, count, betas, eps, weight_decay),
        decoupled,
        bias_correction,
    )
