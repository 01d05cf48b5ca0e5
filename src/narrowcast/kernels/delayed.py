"""Delayed scaling: a launch advances scales and histories of many tensors; another copies the scales of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._checks import shown
from ..formats import FLT_MAX, cdiv
from .launch import PLAIN, TENSOR, Launch, Launcher, beside, check_device, remembered

COLUMNS = 8  # 32 bytes of a history's row
ROWS = 1024  # at once, at most: a program that walks down a history in steps waits for memory at each of them
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def _renew_columns(
    scale_ptr,
    history_ptr,
    amax_ptr,
    scaled_max,
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
    largest = tl.full(amax.shape, 0.0, tl.float32) + tl.cast(scaled_max, tl.float32)
    quotient = tl.minimum(tl.div_rn(largest, amax), _FLT_MAX)
    scale = tl.where(used & (amax > 0.0) & (amax < float("inf")), quotient, scale)
    tl.debug_barrier()  # scale and amax have been read by all threads
    tl.store(scale_ptr + column, scale, mask=inside)
    tl.store(amax_ptr + column, tl.zeros(last.shape, tl.float32), mask=inside)


_STATE = ("scale_ptr", "history_ptr", "amax_ptr")


@triton.jit(do_not_specialize_on_alignment=_STATE)
def _delayed_renew_kernel(
    scale_ptr,
    history_ptr,
    amax_ptr,
    scaled_max,
    L,
    n,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _renew_columns(scale_ptr, history_ptr, amax_ptr, scaled_max, L, n, MAXIMUM, ROWS, COLUMNS)


@triton.jit
def _delayed_renew_many_kernel(
    addresses_ptr,
    lengths_ptr,
    sizes_ptr,
    largest_ptr,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    state = tl.program_id(1)
    scale_ptr = tl.load(addresses_ptr + state * 3).to(tl.pointer_type(tl.float32))
    history_ptr = tl.load(addresses_ptr + state * 3 + 1).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(addresses_ptr + state * 3 + 2).to(tl.pointer_type(tl.float32))
    _renew_columns(
        scale_ptr, history_ptr, amax_ptr, tl.load(largest_ptr + state), tl.load(lengths_ptr + state),
        tl.load(sizes_ptr + state), MAXIMUM, ROWS, COLUMNS,
    )  # fmt: skip


_renew_one = Launcher(_delayed_renew_kernel, num_warps=8, undeclared=_STATE)
_renew_many = Launcher(_delayed_renew_many_kernel, num_warps=8)

_TABLES: dict[Any, list[tuple[tuple[Tensor, ...], tuple[int, int, int], tuple[Any, ...]]]] = {}
"""Arguments of the launches that renew many states, which depend on the key alone. A captured graph may read them, so
none is ever freed."""
MOST_TABLES = 64

_CAPTURED: list[Any] = []
"""States that captured graphs renew, whoever owned them: none is ever freed, for replays write to them."""


def renew(
    scales: Sequence[Tensor],
    histories: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    *,
    fp8_maxes: Sequence[float],
    margins: Sequence[int],
    algos: Sequence[str],
) -> None:
    """Compute ``reference.delayed.renew`` in a launch for each algorithm; all tensors are contiguous.

    Each state takes a launch where addresses are new while a graph is captured, and after ``MOST_TABLES`` others. So
    that these launches are loaded then, they follow every new table; a second renewal changes nothing.
    """
    check_device(scales[0])
    device = scales[0].device
    addresses = [x.data_ptr() for states in zip(scales, histories, amaxes) for x in states]
    shapes = [history.shape for history in histories]
    largest = [math.ldexp(fp8_max, -margin) for fp8_max, margin in zip(fp8_maxes, margins)]
    key = (device, *addresses, *shapes, *largest, *algos)
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured:
        _CAPTURED.append((scales, histories, amaxes))
    known = _TABLES.get(key)
    if known is None and not captured and len(_TABLES) < MOST_TABLES:
        _TABLES[key] = _tables(addresses, shapes, largest, algos, device)
    for arguments, grid, constants in _TABLES.get(key, ()):
        _renew_many(grid, arguments, constants)
    if known is None:
        for *state, (L, n), most, algo in zip(scales, histories, amaxes, shapes, largest, algos):
            if n:
                constants = _takes_maximum(algo), _rows_at_once(L), COLUMNS
                _renew_one((cdiv(n, COLUMNS), 1, 1), (*state, most, L, n), constants)


def _tables(
    addresses: list[int],
    shapes: list[torch.Size],
    largest: list[float],
    algos: Sequence[str],
    device: torch.device,
) -> list[Any]:
    """Return the launches of :func:`renew`: arguments, grid and constants."""
    launches = []
    for algo in dict.fromkeys(algos):
        of_algo = [at for at, one in enumerate(algos) if one == algo and shapes[at][1]]
        if not of_algo:
            continue
        lengths, sizes = zip(*(shapes[at] for at in of_algo))
        columns = (
            ([addresses[3 * at : 3 * at + 3] for at in of_algo], torch.int64),
            (lengths, torch.int32),
            (sizes, torch.int32),
            ([largest[at] for at in of_algo], torch.float32),
        )
        # from memory that is not pinned: they are there for every stream once this returns
        arguments = tuple(torch.tensor(values, dtype=dtype, device=device) for values, dtype in columns)
        grid = cdiv(max(sizes), COLUMNS), len(of_algo), 1
        launches.append((arguments, grid, (_takes_maximum(algo), _rows_at_once(max(lengths)), COLUMNS)))
    return launches


def _takes_maximum(algo: str) -> bool:
    if algo not in ("max", "most_recent"):
        raise ValueError(f"unknown amax_compute_algo {shown(algo)}; use 'max' or 'most_recent'")
    return algo == "max"


def _rows_at_once(length: int) -> int:
    return min(1 << (max(length, 1) - 1).bit_length(), ROWS)


@triton.jit
def _copy_columns(scale_ptr, copy_ptr, unseen, n, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    tl.store(copy_ptr + column, tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale), mask=inside)
    for row in tl.static_range(1, 1 + WORDS):
        tl.store(copy_ptr + row * n + column, tl.zeros(scale.shape, tl.float32), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "first_scale_ptr",
        "first_copy_ptr",
        "second_scale_ptr",
        "second_copy_ptr",
    ]
)
def _delayed_copy_kernel(
    first_scale_ptr,
    first_copy_ptr,
    second_scale_ptr,
    second_copy_ptr,
    first_unseen,
    second_unseen,
    first_n,
    second_n,
    BOTH: tl.constexpr,
    FIRST_WORDS: tl.constexpr,
    SECOND_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _copy_columns(first_scale_ptr, first_copy_ptr, first_unseen, first_n, FIRST_WORDS, COLUMNS)
    elif BOTH:
        _copy_columns(second_scale_ptr, second_copy_ptr, second_unseen, second_n, SECOND_WORDS, COLUMNS)


_copy = Launcher(_delayed_copy_kernel, num_warps=8)


def copy_scales(scales: list[Tensor], unseen: list[float]) -> list[Tensor]:
    """Compute ``reference.delayed.copy_scales``, two vectors in a launch."""
    check_device(scales[0])
    new, copies = beside(scales[0]), []
    launch_of = _copy_launch if type(scales[0]) in PLAIN else _copy_launch.__wrapped__
    for at in range(0, len(scales), 2):
        tensors, sizes, values = [], [], unseen[at : at + 2]
        for scale, value in zip(scales[at : at + 2], values):
            size = scale.shape[0]
            shape = ((4, size), (size, 1)) if value < 0.0 else ((size,), (1,))
            copies.append(new(*shape, torch.float32))
            tensors += [scale, copies[-1]]
            sizes.append(size)
        launch = launch_of(tuple(sizes), tuple(values))
        if launch is not None:
            launch(tensors)
    return copies


@remembered
def _copy_launch(sizes: tuple[int, ...], unseen: tuple[float, ...]) -> Launch | None:
    """Return the launch for one or two vectors of these sizes; None if they are empty."""
    if not max(sizes):
        return None
    both, words = len(sizes) > 1, [3 if value < 0.0 else 0 for value in unseen]
    tensors = [TENSOR] * 4 if both else [TENSOR, TENSOR, None, None]
    arguments = [*tensors, unseen[0], unseen[-1], sizes[0], sizes[-1]]
    options = (both, words[0], words[-1], COLUMNS)
    return Launch(_copy, (cdiv(max(sizes), COLUMNS), 1 + both, 1), arguments, options)
