"""``narrowcast::delayed_scaling_update_``: roll the amax histories and renew the scales of many modules at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import kernels
from ..formats import E4M3
from ._library import define
from .numerics import numerics_for


def _update(
    scales: list[Tensor], histories: list[Tensor], fp8_max: float, margin: int, length: int, algorithm: str
) -> None:
    """All states of one direction in one batch: in one launch where they lie, else joined and written back."""
    if torch._C._current_graph_task_id() != -1:
        return  # a compiled forward, recomputed in the backward: it must see the scales of the first one
    numerics = numerics_for(scales[0])
    if numerics is kernels:
        table = numerics.delayed.address_table(scales, histories, length)
        if table is not None:
            numerics.delayed.update_(table, fp8_max=fp8_max, margin=margin, length=length, algo=algorithm)
            return
    widths = [scale.numel() for scale in scales]
    scale, history = numerics.delayed.update(
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


def bind_delayed_scaling_update(
    scales: list[Tensor], histories: list[Tensor], fp8_max: float, margin: int, length: int, algorithm: str
) -> Callable[[], None]:
    """:data:`delayed_scaling_update_` for every step to come, in eager code, until the tensors move.

    The addresses of the states are looked up once, where one launch serves them all.
    """
    step = functools.partial(delayed_scaling_update_, scales, histories, fp8_max, margin, length, algorithm)
    numerics = numerics_for(scales[0])
    if numerics is not kernels or torch.cuda.is_current_stream_capturing():
        return step
    table = numerics.delayed.address_table(scales, histories, length)
    if table is None:
        return step

    def launch() -> None:
        if torch.cuda.is_current_stream_capturing():  # a graph keeps its table: that one's owner sees to it
            step()
        else:
            numerics.delayed.update_(table, fp8_max=fp8_max, margin=margin, length=length, algo=algorithm)

    return launch


def _calibrate(x: Tensor, amax: Tensor, slot: int) -> None:
    taken = amax.view(-1)[slot : slot + 1].zero_()
    # a cast without outputs raises the amax and nothing else; its scale does not matter
    numerics_for(x).float8.quantize(x, taken, E4M3, rowwise=False, columnwise=False, amax=taken)


def _calibrate_fake(x: Tensor, amax: Tensor, slot: int) -> None:
    return None


calibrate_ = define("calibrate_(Tensor x, Tensor(a!) amax, int slot) -> ()", _calibrate, _calibrate_fake)
"""Overwrite one slot of ``amax`` with max|x|, without quantizing."""
