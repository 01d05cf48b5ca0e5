"""Delayed scaling: a launch advances scales and histories of many tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._checks import shown
from ..formats import FLT_MAX, cdiv
from .launch import Launcher, check_device

COLUMNS = 8  # 32 bytes of a history's row
ROWS = 1024  # at once, at most: a program that walks down a history in steps waits for memory at each of them
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def _renew_columns(
    scale_ptr,
    history_ptr,
    amax_ptr,
    first_max,
    last_max,
    L,
    n,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    last = tl.load(amax_ptr + column, mask=inside, other=0.0)
    last = tl.where(last < float("inf"), last, 0.0)  # neither that nor NaN tells anything
    used = last != 0.0
    amax = last
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
        kept = tl.where(used[None, :], rolled, old)
        tl.debug_barrier()  # no row may be overwritten before its neighbor has been read
        tl.store(history_ptr + index * n + column[None, :], tl.where(index == 0, 0.0, kept), mask=here)
        start += ROWS
    largest = tl.where(column < n // 2, tl.cast(first_max, tl.float32), tl.cast(last_max, tl.float32))
    quotient = tl.minimum(tl.div_rn(largest, amax), _FLT_MAX)
    scale = tl.where(used & (amax > 0.0) & (amax < float("inf")), quotient, scale)
    tl.debug_barrier()  # scale and amax have been read by all threads
    tl.store(scale_ptr + column, scale, mask=inside)
    tl.store(amax_ptr + column, tl.zeros(last.shape, tl.float32), mask=inside)


STATES = 8  # in a launch, at most
_POINTERS = [f"{kind}_{at}_ptr" for at in range(STATES) for kind in ("scale", "history", "amax")]


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _delayed_renew_kernel(
    scale_0_ptr, history_0_ptr, amax_0_ptr, first_0, last_0,
    scale_1_ptr, history_1_ptr, amax_1_ptr, first_1, last_1,
    scale_2_ptr, history_2_ptr, amax_2_ptr, first_2, last_2,
    scale_3_ptr, history_3_ptr, amax_3_ptr, first_3, last_3,
    scale_4_ptr, history_4_ptr, amax_4_ptr, first_4, last_4,
    scale_5_ptr, history_5_ptr, amax_5_ptr, first_5, last_5,
    scale_6_ptr, history_6_ptr, amax_6_ptr, first_6, last_6,
    scale_7_ptr, history_7_ptr, amax_7_ptr, first_7, last_7,
    L, n, MAXIMUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    state = tl.program_id(1)
    if state == 0:
        _renew_columns(scale_0_ptr, history_0_ptr, amax_0_ptr, first_0, last_0, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 1:
        _renew_columns(scale_1_ptr, history_1_ptr, amax_1_ptr, first_1, last_1, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 2:
        _renew_columns(scale_2_ptr, history_2_ptr, amax_2_ptr, first_2, last_2, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 3:
        _renew_columns(scale_3_ptr, history_3_ptr, amax_3_ptr, first_3, last_3, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 4:
        _renew_columns(scale_4_ptr, history_4_ptr, amax_4_ptr, first_4, last_4, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 5:
        _renew_columns(scale_5_ptr, history_5_ptr, amax_5_ptr, first_5, last_5, L, n, MAXIMUM, ROWS, COLUMNS)
    elif state == 6:
        _renew_columns(scale_6_ptr, history_6_ptr, amax_6_ptr, first_6, last_6, L, n, MAXIMUM, ROWS, COLUMNS)
    else:
        _renew_columns(scale_7_ptr, history_7_ptr, amax_7_ptr, first_7, last_7, L, n, MAXIMUM, ROWS, COLUMNS)


_renew = Launcher(_delayed_renew_kernel, num_warps=8)


def renew(
    scales: Sequence[Tensor],
    histories: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    *,
    fp8_maxes: Sequence[float],
    margins: Sequence[int],
    algos: Sequence[str],
) -> None:
    """Compute ``reference.delayed.renew``, eight states of one shape and algorithm in a launch; all are contiguous."""
    check_device(scales[0])
    alike: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for at, (*state, margin, algo) in enumerate(zip(scales, histories, amaxes, margins, algos)):
        largest = [math.ldexp(fp8_max, -margin) for fp8_max in fp8_maxes[2 * at : 2 * at + 2]]
        alike.setdefault((*state[1].shape, algo), []).append((*state, *largest))
    for (L, n, algo), states in alike.items():
        if algo not in ("max", "most_recent"):
            raise ValueError(f"unknown amax_compute_algo {shown(algo)}; use 'max' or 'most_recent'")
        constants = algo == "max", min(1 << (max(L, 1) - 1).bit_length(), ROWS), COLUMNS
        for at in range(0, len(states) if n else 0, STATES):
            some = states[at : at + STATES]
            # the first one again in the places of others, which no program renews
            arguments = itertools.chain(*some, *some[:1] * (STATES - len(some)))
            _renew((cdiv(n, COLUMNS), len(some), 1), (*arguments, L, n), constants)
