"""``narrowcast::delayed_scaling_update_``: roll the amax histories and renew the scales of many modules at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ._library import define
from .numerics import numerics_for


def _update(
    scales: list[Tensor], histories: list[Tensor], fp8_max: float, margin: int, length: int, algorithm: str
) -> None:
    """All states of one direction in one batch: joined, updated by the reference rule, written back in place."""
    if torch._C._current_graph_task_id() != -1:
        return  # a compiled forward, recomputed in the backward: it must see the scales of the first one
    widths = [scale.numel() for scale in scales]
    scale, history = numerics_for(scales[0]).delayed.update(
        torch.cat(scales),
        torch.cat([history[:length] for history in histories], dim=1),
        fp8_max=fp8_max,
        margin=margin,
        algo=algorithm,
    )
    torch._foreach_copy_(scales, list(scale.split(widths)))
    torch._foreach_copy_([h[:length] for h in histories], list(history.split(widths, dim=1)))


def _update_fake(
    scales: list[Tensor], histories: list[Tensor], fp8_max: float, margin: int, length: int, algorithm: str
) -> None:
    return None


delayed_scaling_update_ = define(
    "delayed_scaling_update_(Tensor(a!)[] scales, Tensor(b!)[] histories, float fp8_max, SymInt margin, "
    "SymInt length, str algorithm) -> ()",
    _update,
    _update_fake,
)
"""Update scales ``(n,)`` from histories ``(L, n)`` whose row 0 collected the step; rows past ``length`` rest."""


def _calibrate(x: Tensor, amax: Tensor, slot: int) -> None:
    amax.view(-1)[slot : slot + 1].copy_(reference.scaling.amax(x))


def _calibrate_fake(x: Tensor, amax: Tensor, slot: int) -> None:
    return None


calibrate_ = define("calibrate_(Tensor x, Tensor(a!) amax, int slot) -> ()", _calibrate, _calibrate_fake)
"""Overwrite one slot of ``amax`` with max|x|, without quantizing."""
