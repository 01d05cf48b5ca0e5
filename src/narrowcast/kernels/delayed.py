"""Delayed scaling: one launch advances scales and amax histories of many tensors, another copies a layer's scales."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, cdiv
from .launch import INTERPRETING, Launcher, check_device

COLUMNS = 8  # 32 bytes of a history's row
ROWS = 1024  # at once, at most: a program that walks down a history in steps waits for memory at each of them
COPY_BLOCK = 128
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "history_ptr", "reduced_ptr"])
def _update_kernel(
    scale_ptr,
    history_ptr,
    reduced_ptr,
    new_scale_ptr,
    new_history_ptr,
    scaled_max,
    L,
    n,
    REDUCED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    last = tl.load(history_ptr + column, mask=inside, other=0.0)
    if IN_PLACE:
        last = tl.load(reduced_ptr + column, mask=inside, other=0.0)
    elif REDUCED:
        reduced = tl.load(reduced_ptr + column, mask=inside, other=0.0)
        last = tl.where(reduced != 0.0, reduced, last)
    used = last != 0.0  # true for NaN as well

    amax = last
    if MAXIMUM:
        amax = tl.where(last == last, last, 0.0)
    row = tl.arange(0, ROWS)[:, None]
    start = 0
    while start < L:
        index = start + row
        here = (index < L) & inside[None, :]
        old = tl.load(history_ptr + index * n + column[None, :], mask=here, other=0.0)
        if MAXIMUM:
            past = tl.where((index > 0) & (old == old), old, 0.0)
            amax = tl.maximum(amax, tl.max(past, axis=0))
        next_row = tl.load(
            history_ptr + (index + 1) * n + column[None, :], mask=here & (index + 1 < L), other=0.0
        )
        rolled = tl.where(index == L - 1, last[None, :], next_row)
        rolled = tl.where(index == 0, 0.0, rolled)
        if IN_PLACE:
            old = tl.where(index == 0, last[None, :], old)
            tl.debug_barrier()  # no row may be overwritten before its neighbour has been read
        tl.store(
            new_history_ptr + index * n + column[None, :], tl.where(used[None, :], rolled, old), mask=here
        )
        start += ROWS

    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    quotient = tl.minimum(tl.div_rn(tl.full(amax.shape, 0.0, tl.float32) + scaled_max, amax), _FLT_MAX)
    renewed = tl.where(used & (amax > 0.0) & (amax < float("inf")), quotient, scale)
    tl.store(new_scale_ptr + column, renewed, mask=inside)
    if IN_PLACE:
        tl.debug_barrier()
        tl.store(reduced_ptr + column, tl.zeros(last.shape, tl.float32), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "first_copy_ptr", "second_ptr", "second_copy_ptr"])
def _copy_kernel(
    first_ptr, first_copy_ptr, second_ptr, second_copy_ptr, first_size, second_size, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(first_ptr + index, mask=index < first_size, other=0.0)
    second = tl.load(second_ptr + index, mask=index < second_size, other=0.0)
    tl.store(first_copy_ptr + index, first, mask=index < first_size)
    tl.store(second_copy_ptr + index, second, mask=index < second_size)


_update = Launcher(_update_kernel, num_warps=8)
_copy = Launcher(_copy_kernel, num_warps=1)


def update(
    scale: Tensor,
    history: Tensor,
    *,
    fp8_max: float,
    margin: int,
    algo: str,
    reduced_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``reference.delayed.update``; new scales and history are contiguous."""
    scale, history = scale.contiguous(), history.contiguous()
    reduced = scale if reduced_amax is None else reduced_amax.contiguous()
    renewed = torch.empty_like(scale), torch.empty_like(history)
    largest = math.ldexp(fp8_max, -margin)
    _advance(scale, history, reduced, renewed, largest, algo, reduced_amax is not None, False)
    return renewed


def renew(scale: Tensor, history: Tensor, amax: Tensor, *, fp8_max: float, margin: int, algo: str) -> None:
    """``reference.delayed.renew``; all tensors contiguous."""
    _advance(scale, history, amax, (scale, history), math.ldexp(fp8_max, -margin), algo, False, True)


def _advance(
    scale: Tensor,
    history: Tensor,
    amax: Tensor,
    into: tuple[Tensor, Tensor],
    largest: float,
    algo: str,
    reduced: bool,
    in_place: bool,
) -> None:
    check_device(scale)
    if algo not in ("max", "most_recent"):
        raise ValueError(f"unknown amax_compute_algo {algo!r}; use 'max' or 'most_recent'")
    L, n = history.shape
    if n:
        _update(
            (cdiv(n, COLUMNS), 1, 1),
            (scale, history, amax, *into, largest, L, n),
            (
                reduced, in_place, algo == "max", min(triton.next_power_of_2(max(L, 1)), ROWS), COLUMNS, INTERPRETING,
            ),
        )  # fmt: skip


def copy_scales(scales: list[Tensor]) -> list[Tensor]:
    """``reference.delayed.copy_scales``, two vectors in a launch: those of a layer's forward and backward."""
    copies = [torch.empty_like(scale) for scale in scales]
    for at in range(0, len(scales), 2):
        first, first_copy = scales[at], copies[at]
        second, second_copy = (
            (scales[at + 1], copies[at + 1]) if at + 1 < len(scales) else (first, first_copy)
        )
        check_device(first)
        sizes = (first.numel(), second.numel())
        if max(sizes):
            _copy(
                (cdiv(max(sizes), COPY_BLOCK), 1, 1),
                (first, first_copy, second, second_copy, *sizes),
                (COPY_BLOCK,),
            )
    return copies
