"""Delayed scaling: one launch advances scales and histories of many tensors, or copies the scales of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLT_MAX, cdiv
from ..upstream.cuda import current_stream
from .launch import PLAIN, TENSOR, Launch, Launcher, beside, check_device, remembered

COLUMNS = 8  # 32 bytes of a history's row
ROWS = 1024  # at once, at most: a program that walks down a history in steps waits for memory at each of them
_FLT_MAX = tl.constexpr(FLT_MAX)


@triton.jit
def _advance(
    scale,
    history_ptr,
    new_history_ptr,
    last,
    column,
    inside,
    scaled_max,
    L,
    n,
    IN_PLACE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Roll some columns of a history and return their new scales; ``IN_PLACE``: ``last`` becomes row 0 before."""
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
            tl.debug_barrier()  # no row may be overwritten before its neighbor has been read
        tl.store(
            new_history_ptr + index * n + column[None, :], tl.where(used[None, :], rolled, old), mask=here
        )
        start += ROWS
    largest = tl.full(amax.shape, 0.0, tl.float32) + tl.cast(scaled_max, tl.float32)
    quotient = tl.minimum(tl.div_rn(largest, amax), _FLT_MAX)
    return tl.where(used & (amax > 0.0) & (amax < float("inf")), quotient, scale)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "history_ptr", "reduced_ptr"])
def _delayed_update_kernel(
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
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    last = tl.load(history_ptr + column, mask=inside, other=0.0)
    if REDUCED:
        reduced = tl.load(reduced_ptr + column, mask=inside, other=0.0)
        last = tl.where(reduced != 0.0, reduced, last)
    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    scale = _advance(
        scale, history_ptr, new_history_ptr, last, column, inside, scaled_max, L, n, False, MAXIMUM, ROWS
    )  # fmt: skip
    tl.store(new_scale_ptr + column, scale, mask=inside)


@triton.jit
def _renew_columns(
    scale_ptr,
    history_ptr,
    amax_ptr,
    copy_ptr,
    scaled_max,
    unseen,
    L,
    n,
    RENEW: tl.constexpr,
    COPY: tl.constexpr,
    WORDS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    scale = tl.load(scale_ptr + column, mask=inside, other=1.0)
    if RENEW:
        last = tl.load(amax_ptr + column, mask=inside, other=0.0)
        last = tl.where(last < float("inf"), last, 0.0)  # nor does NaN tell anything
        scale = _advance(
            scale, history_ptr, history_ptr, last, column, inside, scaled_max, L, n, True, MAXIMUM, ROWS
        )  # fmt: skip
        tl.debug_barrier()  # scale and amax have been read by all threads
        tl.store(scale_ptr + column, scale, mask=inside)
        tl.store(amax_ptr + column, tl.zeros(last.shape, tl.float32), mask=inside)
    if COPY:
        tl.store(copy_ptr + column, tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale), mask=inside)
        for row in tl.static_range(1, 1 + WORDS):
            tl.store(copy_ptr + row * n + column, tl.zeros(scale.shape, tl.float32), mask=inside)


_STATE = [
    f"{which}_{what}_ptr" for which in ("first", "second") for what in ("scale", "history", "amax", "copy")
]


@triton.jit(do_not_specialize_on_alignment=_STATE)
def _delayed_renew_kernel(
    first_scale_ptr,
    first_history_ptr,
    first_amax_ptr,
    first_copy_ptr,
    second_scale_ptr,
    second_history_ptr,
    second_amax_ptr,
    second_copy_ptr,
    first_max,
    second_max,
    first_unseen,
    second_unseen,
    first_L,
    second_L,
    first_n,
    second_n,
    RENEW: tl.constexpr,
    COPY: tl.constexpr,
    BOTH: tl.constexpr,
    FIRST_WORDS: tl.constexpr,
    SECOND_WORDS: tl.constexpr,
    FIRST_MAXIMUM: tl.constexpr,
    SECOND_MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _renew_columns(
            first_scale_ptr, first_history_ptr, first_amax_ptr, first_copy_ptr, first_max, first_unseen, first_L,
            first_n, RENEW, COPY, FIRST_WORDS, FIRST_MAXIMUM, ROWS, COLUMNS,
        )  # fmt: skip
    elif BOTH:
        _renew_columns(
            second_scale_ptr, second_history_ptr, second_amax_ptr, second_copy_ptr, second_max, second_unseen, second_L,
            second_n, RENEW, COPY, SECOND_WORDS, SECOND_MAXIMUM, ROWS, COLUMNS,
        )  # fmt: skip


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
        scale_ptr, history_ptr, amax_ptr, scale_ptr, tl.load(largest_ptr + state), 0.0,
        tl.load(lengths_ptr + state), tl.load(sizes_ptr + state), True, False, 0, MAXIMUM, ROWS, COLUMNS,
    )  # fmt: skip


_update = Launcher(_delayed_update_kernel, num_warps=8)
_renew_many = Launcher(_delayed_renew_many_kernel, num_warps=8)
_renew = Launcher(
    _delayed_renew_kernel, num_warps=8, undeclared=tuple(name for name in _STATE if "copy" not in name)
)


def update(
    scale: Tensor,
    history: Tensor,
    *,
    fp8_max: float,
    margin: int,
    algo: str,
    reduced_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference.delayed.update``; new scales and history are contiguous."""
    check_device(scale)
    scale, history = scale.contiguous(), history.contiguous()
    reduced = None if reduced_amax is None else reduced_amax.contiguous()
    renewed = torch.empty_like(scale), torch.empty_like(history)
    maximum, (L, n) = _takes_maximum(algo), history.shape
    if n:
        _update(
            (cdiv(n, COLUMNS), 1, 1),
            (scale, history, reduced, *renewed, math.ldexp(fp8_max, -margin), L, n),
            (reduced is not None, maximum, _rows_at_once(L), COLUMNS),
        )
    return renewed


def renew(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    *,
    fp8_maxes: list[float],
    margins: list[int],
    algos: list[str],
) -> None:
    """Compute ``reference.delayed.renew``, two states in a launch: those of a layer's forward and backward.

    All tensors are contiguous.
    """
    _run(scales, None, histories, amaxes, list(zip(fp8_maxes, margins, algos)))


_TABLES: dict[Any, list[tuple[tuple[Tensor, ...], tuple[int, int, int], tuple[Any, ...]]]] = {}
"""Arguments of the launches that renew many states, which depend on the key alone. A captured graph may read them, so
none is ever freed."""
MOST_TABLES = 64


def renew_many(
    scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor], *rules: Sequence[Any]
) -> bool:
    """Compute :func:`renew` of many states without copies, in a launch for each algorithm; return whether it did.

    It does not for addresses that are new while a graph is captured, or after ``MOST_TABLES`` others.
    """
    check_device(scales[0])
    device = scales[0].device
    stream = current_stream(device.index) if device.type == "cuda" else 0
    addresses = [x.data_ptr() for states in zip(scales, histories, amaxes) for x in states]
    key = (device, stream, *addresses, *(history.shape for history in histories), *map(tuple, rules))
    launches = _TABLES.get(key)
    if launches is None:
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured or len(_TABLES) >= MOST_TABLES:
            return False
        launches = _TABLES[key] = _tables(addresses, histories, device, *rules)
    for arguments, grid, constants in launches:
        _renew_many(grid, arguments, constants)
    return True


def _tables(
    addresses: list[int],
    histories: Sequence[Tensor],
    device: torch.device,
    fp8_maxes: Sequence[float],
    margins: Sequence[int],
    algos: Sequence[str],
) -> list[Any]:
    """Return the launches of :func:`renew_many`: arguments, grid and constants."""
    launches = []
    for algo in dict.fromkeys(algos):
        of_algo = [at for at, one in enumerate(algos) if one == algo]
        lengths, sizes = zip(*(histories[at].shape for at in of_algo))
        columns = (
            ([addresses[3 * at : 3 * at + 3] for at in of_algo], torch.int64),
            (lengths, torch.int32),
            (sizes, torch.int32),
            ([math.ldexp(fp8_maxes[at], -margins[at]) for at in of_algo], torch.float32),
        )
        pinned = {"pin_memory": device.type == "cuda"}
        arguments = tuple(
            torch.tensor(values, dtype=dtype, **pinned).to(device, non_blocking=True)
            for values, dtype in columns
        )
        grid = cdiv(max(sizes), COLUMNS), len(of_algo), 1
        launches.append((arguments, grid, (_takes_maximum(algo), _rows_at_once(max(lengths)), COLUMNS)))
    return launches


def copy_scales(scales: list[Tensor], unseen: list[float]) -> list[Tensor]:
    """Compute ``reference.delayed.copy_scales``, two vectors in a launch."""
    nothing: list[None] = [None] * len(scales)
    return _run(scales, unseen, nothing, nothing, [(0.0, 0, "max")] * len(scales))


def _run(
    scales: list[Tensor],
    unseen: list[float] | None,
    histories: list[Any],
    amaxes: list[Any],
    rules: list[tuple[float, int, str]],
) -> list[Tensor]:
    check_device(scales[0])
    new, copies = beside(scales[0]), []
    launch_of = _launch if type(scales[0]) in PLAIN else _launch.__wrapped__
    for at in range(0, len(scales), 2):
        pair = range(at, min(at + 2, len(scales)))
        states, tensors = [], []
        for one in pair:
            scale, history, amax = scales[one], histories[one], amaxes[one]
            size, length = scale.shape[0], 0
            tensors.append(scale)
            if history is not None:
                length = history.shape[0]
                tensors += (history, amax)
            value = 0.0
            if unseen is not None:
                value, rows = unseen[one], 4 if unseen[one] < 0.0 else 1
                shape = ((size,), (1,)) if rows == 1 else ((rows, size), (size, 1))
                copies.append(new(*shape, torch.float32))
                tensors.append(copies[-1])
            states.append((size, length, *rules[one], value))
        launch = launch_of(tuple(states), histories[at] is not None, unseen is not None)
        if launch is not None:
            launch(tensors)
    return copies


@remembered
def _launch(
    states: tuple[tuple[int, int, float, int, str, float], ...],
    renewing: bool,
    copying: bool,
) -> Launch | None:
    """Return the launch for one or two states with sizes, lengths, a rule and what is unseen; None if empty."""
    sizes, lengths, fp8_maxes, margins, algos, unseen = zip(*(states[0], states[-1]))
    largest = [math.ldexp(fp8_max, -margin) for fp8_max, margin in zip(fp8_maxes, margins)]
    maxima, words = [_takes_maximum(algo) for algo in algos], [3 if value < 0.0 else 0 for value in unseen]
    both, size = len(states) > 1, max(sizes)
    if not size:
        return None
    one = [TENSOR, *[TENSOR if renewing else None] * 2, TENSOR if copying else None]
    arguments = [
        *one, *(one if both else [None] * 4), *largest, *unseen, *lengths, *sizes,
    ]  # fmt: skip
    options = (renewing, copying, both, *words, *maxima, _rows_at_once(max(lengths)), COLUMNS)
    return Launch(_renew, (cdiv(size, COLUMNS), 1 + both, 1), arguments, options)


def _takes_maximum(algo: str) -> bool:
    if algo not in ("max", "most_recent"):
        raise ValueError(f"unknown amax_compute_algo {algo!r}; use 'max' or 'most_recent'")
    return algo == "max"


def _rows_at_once(length: int) -> int:
    return min(1 << (max(length, 1) - 1).bit_length(), ROWS)
