"""Delayed scaling: one launch that advances the scales and amax histories of any number of tensors.

``update`` takes all tensors as the columns of one matrix and returns new ones. ``update_`` works in place on the states
of many modules, which lie anywhere in memory: it finds them through a table of addresses on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, cdiv
from .launch import INTERPRETING, Launcher, check_device

COLUMNS = 32
ROWS = 64
TABLE_COLUMNS = 4  # a module has two or three tensors; more take further rounds
TABLE_ROWS = 256
TABLES_KEPT = 64
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def _renewed_scale(scale, amax, used, scaled_max):
    """``RN(scaled_max / amax)`` where the tensor was used and its amax says something, else ``scale``."""
    quotient = tl.minimum(tl.div_rn(tl.full(amax.shape, 0.0, tl.float32) + scaled_max, amax), _FLT_MAX)
    return tl.where(used & (amax > 0.0) & (amax < float("inf")), quotient, scale)


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
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    last = tl.load(history_ptr + column, mask=inside, other=0.0)
    if REDUCED:
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
        tl.store(
            new_history_ptr + index * n + column[None, :], tl.where(used[None, :], rolled, old), mask=here
        )
        start += ROWS

    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    renewed = _renewed_scale(scale, amax, used, scaled_max)
    tl.store(new_scale_ptr + column, renewed, mask=inside)


@triton.jit
def _update_in_place_kernel(
    table_ptr, scaled_max, L, MAXIMUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    entry = table_ptr + tl.program_id(0) * 3
    scale_ptr = tl.load(entry).to(tl.pointer_type(tl.float32))
    history_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    n = tl.load(entry + 2).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    first = 0
    while first < n:
        column = first + tl.arange(0, COLUMNS)
        inside = column < n
        last = tl.load(history_ptr + column, mask=inside, other=0.0)
        used = last != 0.0  # true for NaN as well
        amax = last
        if MAXIMUM:
            amax = tl.where(last == last, last, 0.0)
        start = 0
        while start < L:
            index = start + row
            place = history_ptr + index * n + column[None, :]
            next_row = tl.load(place + n, mask=(index + 1 < L) & inside[None, :], other=0.0)
            if MAXIMUM:
                amax = tl.maximum(amax, tl.max(tl.where(next_row == next_row, next_row, 0.0), axis=0))
            rolled = tl.where(index == L - 1, last[None, :], next_row)
            rolled = tl.where(index == 0, 0.0, rolled)
            # Every thread has read before any overwrites: a row goes to the place of the row before.
            tl.debug_barrier()
            tl.store(place, rolled, mask=(index < L) & inside[None, :] & used[None, :])
            start += ROWS
        scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
        tl.store(scale_ptr + column, _renewed_scale(scale, amax, used, scaled_max), mask=inside)
        first += COLUMNS


_update = Launcher(_update_kernel, num_warps=4)
_update_in_place = Launcher(_update_in_place_kernel, num_warps=4)

_tables: dict[tuple[Any, ...], Tensor] = {}
_captured: set[tuple[Any, ...]] = set()  # tables that a CUDA graph reads: they live as long as the process


def update(
    scale: Tensor,
    history: Tensor,
    *,
    fp8_max: float,
    margin: int,
    algo: str,
    reduced_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance scales and histories by one step, leaving tensors that were not used alone.

    Args:
        scale: fp32 (n,), the scales of the step that ended.
        history: fp32 (L, n); row 0 collected the step's amaxes.
        fp8_max: the largest value of the element format.
        margin: the scale is 2**-margin below the one that maps amax to ``fp8_max``.
        algo: "max" over the whole history or "most_recent".
        reduced_amax: fp32 (n,), amaxes reduced over processes; where it is 0 the local row 0 counts.

    Returns:
        New scale (n,) and history (L, n), contiguous.

    Raises:
        ValueError: a tensor the kernel cannot reach, or an unknown ``algo``.

    Numerics:
        Equal to ``reference.delayed.update``.
    """
    check_device(scale)
    _check_algorithm(algo)
    scale, history = scale.contiguous(), history.contiguous()
    reduced = scale if reduced_amax is None else reduced_amax.contiguous()
    L, n = history.shape
    new_scale, new_history = torch.empty_like(scale), torch.empty_like(history)
    if n:
        _update(
            (cdiv(n, COLUMNS), 1, 1),
            (scale, history, reduced, new_scale, new_history, math.ldexp(fp8_max, -margin), L, n),
            (reduced_amax is not None, algo == "max", ROWS, COLUMNS, INTERPRETING),
        )
    return new_scale, new_history


def address_table(scales: list[Tensor], histories: list[Tensor], length: int) -> Tensor | None:
    """Where the states of many modules lie, for ``update_``; remembered until the states move.

    Args:
        scales: fp32 (n,) each, on one device.
        histories: fp32 (at least ``length``, n) each, of the same device.
        length: rows of the histories in use.

    Returns:
        int64 (modules, 3): addresses of scale and history, and n. None where ``update_`` cannot serve: strided
        tensors, a history that is too short, or a table that a CUDA graph under capture would have to copy.

    Raises:
        ValueError: a tensor the kernel cannot reach.
    """
    check_device(scales[0])
    device = scales[0].device
    entries = tuple((s.data_ptr(), h.data_ptr(), s.numel()) for s, h in zip(scales, histories, strict=True))
    key = (device, entries)
    fits = all(s.is_contiguous() for s in scales) and all(
        h.is_contiguous() and h.shape[0] >= length for h in histories
    )
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not fits or (capturing and key not in _tables):
        return None
    if capturing:
        _captured.add(key)
    elif key not in _tables:
        if len(_tables) - len(_captured) >= TABLES_KEPT:
            for old in [known for known in _tables if known not in _captured]:
                del _tables[old]
        # From pinned memory the copy is asynchronous; the host block is not reused before it is done.
        table = torch.tensor(entries, dtype=torch.int64, pin_memory=device.type == "cuda")
        _tables[key] = table.to(device, non_blocking=True)
    return _tables[key]


def update_(table: Tensor, *, fp8_max: float, margin: int, length: int, algo: str) -> None:
    """Advance the states of many modules by one step in place, in one launch.

    Args:
        table: what ``address_table`` returned for live tensors.
        fp8_max: the largest value of the element format.
        margin: the scale is 2**-margin below the one that maps amax to ``fp8_max``.
        length: rows of the histories in use; those after them rest.
        algo: "max" over the rows in use or "most_recent".

    Raises:
        ValueError: an unknown ``algo``.

    Numerics:
        Equal to ``reference.delayed.update`` of every module's own scale and ``history[:length]``.
    """
    _check_algorithm(algo)
    _update_in_place(
        (table.shape[0], 1, 1),
        (table, math.ldexp(fp8_max, -margin), length),
        (algo == "max", TABLE_ROWS, TABLE_COLUMNS),
    )


def _check_algorithm(algo: str) -> None:
    if algo not in ("max", "most_recent"):
        raise ValueError(f"unknown amax_compute_algo {algo!r}; use 'max' or 'most_recent'")
