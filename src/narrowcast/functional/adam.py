"""A step of Adam on many parameters of one device."""

from __future__ import annotations

from torch import Tensor

from ._library import always, define
from .numerics import numerics_for


def _adam(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    beside: list[Tensor],
    stored_lr: Tensor | None,
    stored_count: Tensor | None,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    count: int,
    betas: list[float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    if not weights:
        return
    numerics_for(weights[0]).adam.step(
        weights,
        grads,
        first,
        second,
        beside,
        lr=lr if stored_lr is None else stored_lr,
        count=count if stored_count is None else stored_count,
        inv_scale=inv_scale,
        found_inf=found_inf,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
    )


adam_ = define(
    "adam_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] beside, "
    "Tensor? stored_lr, Tensor? stored_count, Tensor? inv_scale, Tensor? found_inf, float lr, SymInt count, "
    "float[] betas, float eps, float weight_decay, bool decoupled, bool bias_correction) -> ()",
    _adam,
    lambda *_: None,
    inlined=always,
)
"""Step weights and moments in place, and write what stands beside the weights, as ``reference.adam.step``.

Rate and count are those that are stored, on the device, where there are any, else the numbers.
"""
