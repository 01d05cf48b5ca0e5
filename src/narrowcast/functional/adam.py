"""A step of Adam on many parameters of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._library import always, define
from .numerics import numerics_for

_OPTIONS = ("betas", "eps", "weight_decay", "decoupled", "bias_correction")


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
    *options: Any,
) -> None:
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
        **dict(zip(_OPTIONS, options, strict=True)),
    )


_adam_ = define(
    "adam_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] beside, "
    "Tensor(e!)[] ranges, Tensor? stored_lr, Tensor? stored_count, Tensor? inv_scale, Tensor? found_inf, float lr, "
    "SymInt count, float[] betas, float eps, float weight_decay, bool decoupled, bool bias_correction) -> ()",
    _adam,
    lambda *_: None,
    inlined=always,
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
) -> None:
    """Step weights and moments in place, and write what stands beside the weights, as ``reference.adam.step``.

    Rate and count may be tensors, which are read on the weights' device.
    """
    if not weights:
        return
    device = weights[0].device
    stored = [x.to(device) if isinstance(x, Tensor) else None for x in (lr, count, inv_scale, found_inf)]
    _adam_(
        weights,
        grads,
        first,
        second,
        beside,
        ranges or [],
        *stored,
        0.0 if isinstance(lr, Tensor) else float(lr),
        0 if isinstance(count, Tensor) else count,
        list(betas),
        float(eps),
        float(weight_decay),
        decoupled,
        bias_correction,
    )
