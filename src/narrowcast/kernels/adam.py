"""A step of Adam: one pass over weights, gradients and moments, whatever each is stored in.

It is bound by memory, 14 bytes of an element where all is bf16, 28 in fp32; with moments in codes by arithmetic. What
depends on the rate and the step count alone, one program computes beforehand, so that neither has to be known on the
host.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import FLOAT8_BLOCK, cdiv
from .adam_step import halves, joined, rounded_at_random, stepped
from .codecs import product, round_to_dtype, to_float32
from .fused_producers import Source
from .launch import Launcher, check_device, check_input, is_aligned, is_traced
from .log_codes import decode_logarithms, encode_logarithms

BLOCK, BLOCK_CODED = 1024, 256
AT_ONCE = 8
NOTHING, COPY, REST, RANDOM = 0, 1, 2, 3
_NO_DECAY, _OF_GRADIENTS, _OF_WEIGHTS = 0, 1, 2
_DTYPE_OF = operator.attrgetter("dtype")
# Of a program, with moments in codes: what is the same for all takes a part of its time.
_TILES = tl.constexpr(4)
_FEW = 2**31 - 2**16  # elements that 32 bits count, a block more included


@triton.jit
def _correction(missing, count):
    """Compute ``reference.adam.correction``, (1,)."""
    power = tl.full((1,), 0.0, tl.float32) + tl.cast(missing, tl.float32)
    total = tl.full((1,), 0.0, tl.float32)
    while count > 0:
        total = tl.where(count % 2 == 1, total + product(power, 1.0 - total), total)
        power = product(power, 2.0 - power)
        count = count // 2
    return total


@triton.jit(do_not_specialize=["count"])
def _adam_factors_kernel(
    factors_ptr,
    lr,
    count,
    beta1,
    missing1,
    beta2,
    missing2,
    eps,
    decay,
    STORED_LR: tl.constexpr,
    STORED_COUNT: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    if STORED_LR:
        lr = tl.load(lr)
    rate = tl.full((1,), 0.0, tl.float32) + tl.cast(lr, tl.float32)
    floor = tl.full((1,), 0.0, tl.float32) + tl.cast(eps, tl.float32)
    here = factors_ptr + tl.arange(0, 1)
    tl.store(here + 2, rate * tl.cast(decay, tl.float32))
    zero = tl.full((1,), 0.0, tl.float32)
    tl.store(here + 3, zero + tl.cast(beta1, tl.float32))
    tl.store(here + 4, zero + tl.cast(missing1, tl.float32))
    tl.store(here + 5, zero + tl.cast(beta2, tl.float32))
    tl.store(here + 6, zero + tl.cast(missing2, tl.float32))
    tl.store(here + 7, zero + tl.cast(decay, tl.float32))
    if STORED_COUNT:
        count = tl.load(count).to(tl.int32)
    count = tl.full((), 0, tl.int32) + count  # else 1 would be a constant
    tl.store(here + 8, (tl.full((1,), 0, tl.int32) + count).to(tl.float32, bitcast=True))
    if CORRECTED:
        root = tl.sqrt_rn(_correction(missing2, count))
        rate = tl.div_rn(rate * root, _correction(missing1, count))
        floor = floor * root
    tl.store(here, rate)
    tl.store(here + 1, floor)


@triton.jit
def _pick(i, x0, x1, x2, x3, x4, x5, x6, x7):
    low = tl.where(i == 0, x0, tl.where(i == 1, x1, tl.where(i == 2, x2, x3)))
    high = tl.where(i == 4, x4, tl.where(i == 5, x5, tl.where(i == 6, x6, x7)))
    return tl.where(i < 4, low, high)


@triton.jit
def _load(ptr, inside):
    if inside is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def _load_moment(
    ptr,
    range_ptr,
    at,
    inside,
    group,
    groups,
    SIGNED: tl.constexpr,
    CODED: tl.constexpr,
):
    if CODED:
        there = range_ptr + group * 2
        top, bottom = _load(there, groups), _load(there + 1, groups)
        return decode_logarithms(_load(ptr + at, inside), top, bottom, SIGNED)
    else:
        return to_float32(_load(ptr + at, inside))


@triton.jit
def _store_moment(
    ptr,
    range_ptr,
    x,
    at,
    inside,
    group,
    groups,
    SIGNED: tl.constexpr,
    CODED: tl.constexpr,
):
    if CODED:
        codes, top, bottom = encode_logarithms(x, SIGNED)
        tl.store(ptr + at, codes, mask=inside)
        there = range_ptr + group * 2
        tl.store(there, top, mask=groups)
        tl.store(there + 1, bottom, mask=groups)
    else:
        tl.store(ptr + at, round_to_dtype(x, ptr.dtype.element_ty), mask=inside)


@triton.jit
def _step_tile(
    tile,
    n,
    weight_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    beside_ptr,
    first_range_ptr,
    factors_ptr,
    inv_scale_ptr,
    BESIDE: tl.constexpr,
    DECAY: tl.constexpr,
    SCALED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Step the elements of a tile of one tensor; ``WHOLE``: none of them lies past its end."""
    group = tile * (BLOCK // GROUP)
    groups = (n + GROUP - 1) // GROUP
    second_range_ptr = first_range_ptr
    # A group is a row; not by a reshape, past which the compiler sees no contiguous elements.
    if FIRST or SECOND:
        row = tl.expand_dims(tl.arange(0, BLOCK // GROUP), 1)
        at = tile * BLOCK + (row * GROUP + tl.expand_dims(tl.arange(0, GROUP), 0))
        group += row
    else:
        at = tile * BLOCK + tl.arange(0, BLOCK)
    if FIRST and SECOND:
        second_range_ptr += groups * 2
    inside, inside_groups = None, None
    if not WHOLE:
        inside, inside_groups = at < n, group < groups
    weight = _load(weight_ptr + at, inside)
    g = to_float32(_load(grad_ptr + at, inside))
    m = _load_moment(first_ptr, first_range_ptr, at, inside, group, inside_groups, True, FIRST)
    v = _load_moment(second_ptr, second_range_ptr, at, inside, group, inside_groups, False, SECOND)
    if BESIDE == 2:
        w = joined(weight, _load(beside_ptr + at, inside))
    else:
        w = to_float32(weight)
    if SCALED:
        g = product(g, tl.load(inv_scale_ptr).to(tl.float32))
        if not WHOLE:
            g = tl.where(inside, g, 0.0)
    w, m, v = stepped(w, g, m, v, factors_ptr, DECAY)

    _store_moment(first_ptr, first_range_ptr, m, at, inside, group, inside_groups, True, FIRST)
    _store_moment(second_ptr, second_range_ptr, v, at, inside, group, inside_groups, False, SECOND)
    if BESIDE == 2:
        high, rest = halves(w)
        tl.store(weight_ptr + at, high, mask=inside)
        tl.store(beside_ptr + at, rest, mask=inside)
    elif BESIDE == 3 and weight_ptr.dtype.element_ty == tl.bfloat16:
        count = tl.load(factors_ptr + 8).to(tl.int32, bitcast=True)
        tl.store(weight_ptr + at, rounded_at_random(w, at, count), mask=inside)
    else:
        tl.store(weight_ptr + at, round_to_dtype(w, weight_ptr.dtype.element_ty), mask=inside)
    if BESIDE == 1:
        tl.store(beside_ptr + at, round_to_dtype(w, beside_ptr.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def _adam_step_kernel(
    w0, w1, w2, w3, w4, w5, w6, w7,
    g0, g1, g2, g3, g4, g5, g6, g7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    v0, v1, v2, v3, v4, v5, v6, v7,
    b0, b1, b2, b3, b4, b5, b6, b7,
    r0, r1, r2, r3, r4, r5, r6, r7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    s1, s2, s3, s4, s5, s6, s7,
    factors_ptr, inv_scale_ptr, found_inf_ptr,
    BESIDE: tl.constexpr, DECAY: tl.constexpr, SCALED: tl.constexpr, STOPPABLE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Step eight tensors, their programs one after another: those of the second from ``s1`` on, and so forth.

    ``BESIDE``: what stands beside the weights: nothing, a copy, the rest of fp32 values; or nothing, and bf16 weights
    are rounded at random.

    ``FIRST`` and ``SECOND``: the moment is in codes of groups, whose ranges are at ``r0`` and so forth.
    """
    if STOPPABLE:
        if tl.load(found_inf_ptr) != 0:
            return
    program = tl.program_id(0)
    i = (
        (program >= s1).to(tl.int32) + (program >= s2).to(tl.int32) + (program >= s3).to(tl.int32)
        + (program >= s4).to(tl.int32) + (program >= s5).to(tl.int32) + (program >= s6).to(tl.int32)
        + (program >= s7).to(tl.int32)
    )
    weight_ptr = _pick(i, w0, w1, w2, w3, w4, w5, w6, w7)
    grad_ptr = _pick(i, g0, g1, g2, g3, g4, g5, g6, g7)
    first_ptr = _pick(i, m0, m1, m2, m3, m4, m5, m6, m7)
    second_ptr = _pick(i, v0, v1, v2, v3, v4, v5, v6, v7)
    beside_ptr = _pick(i, b0, b1, b2, b3, b4, b5, b6, b7)
    first_range_ptr = _pick(i, r0, r1, r2, r3, r4, r5, r6, r7)
    n = _pick(i, n0, n1, n2, n3, n4, n5, n6, n7)
    program -= _pick(i, 0, s1, s2, s3, s4, s5, s6, s7)
    # fmt: on
    if WIDE:
        program = program.to(tl.int64)
    tensors = (weight_ptr, grad_ptr, first_ptr, second_ptr, beside_ptr, first_range_ptr, factors_ptr, inv_scale_ptr)
    if FIRST or SECOND:
        for tile in range(program * _TILES, program * _TILES + _TILES):
            if (tile + 1) * BLOCK <= n:
                _step_tile(tile, n, *tensors, BESIDE, DECAY, SCALED, FIRST, SECOND, GROUP, BLOCK, True)
            elif tile * BLOCK < n:
                _step_tile(tile, n, *tensors, BESIDE, DECAY, SCALED, FIRST, SECOND, GROUP, BLOCK, False)
    else:
        _step_tile(program, n, *tensors, BESIDE, DECAY, SCALED, FIRST, SECOND, GROUP, BLOCK, False)


_factors = Launcher(_adam_factors_kernel, num_warps=1)
_step = Launcher(_adam_step_kernel, num_warps=4)
_step_coded = Launcher(_adam_step_kernel, num_warps=1, maxnreg=96)  # what a group's elements share crosses no warps


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    beside: Sequence[Tensor],
    ranges: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    count: int | Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    stochastic: bool = False,
) -> None:
    """``reference.adam.step``, equal to the byte, a launch for eight parameters of the same dtypes.

    Raises:
        ValueError: ``check_device`` refuses, or a tensor is of another dtype.
    """
    check_device(weights[0])
    shares = factors(lr, count, betas, eps, weight_decay, bias_correction, weights[0].device)
    shared = (
        shares,
        shares if inv_scale is None else inv_scale,
        shares if found_inf is None else found_inf,
    )
    flags = (decay_of(weight_decay, decoupled), inv_scale is not None, found_inf is not None)
    nothing = [shares] * len(weights)
    given = [[*column] for column in (weights, grads, first, second, beside or nothing, ranges or nothing)]
    columns = [[x if x.is_contiguous() else x.contiguous() for x in column] for column in given]
    alike: dict[Any, list[int]] = {}
    for i, (n, *dtypes, aligned) in enumerate(
        zip(map(Tensor.numel, weights), *(map(_DTYPE_OF, column) for column in columns), _are_aligned(columns))
    ):
        # Alone goes what has no wide loads: there would be a variant for every combination of such tensors.
        together = aligned and n % 16 == 0 and n < _FEW
        alike.setdefault(tuple(dtypes) if together else i, []).append(i)
    for places in alike.values():
        for at in range(0, len(places), AT_ONCE):
            eight = [[column[i] for i in places[at : at + AT_ONCE]] for column in columns]
            _launch(eight, shared, flags, bool(beside), bool(ranges), stochastic)
    for column, dense_column in zip(given, columns):
        for x, dense in zip(column, dense_column):
            if x is not dense and column is not given[1]:
                x.copy_(dense)


def factors(
    lr: float | Tensor,
    count: int | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    device: torch.device,
) -> Tensor:
    """Return what all parameters of a step share, fp32 (9,): the factors of ``reference.adam.factors``, then the betas,
    each with what it lacks to 1, the decay, and the bits of the count.
    """
    made = torch.empty(9, dtype=torch.float32, device=device)
    stored = isinstance(lr, Tensor), isinstance(count, Tensor)
    numbers = (betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, weight_decay)
    _factors((1, 1, 1), (made, lr, count, *numbers), (*stored, bias_correction))
    return made


def step_one(
    shares: Tensor, decay: int, weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, beside: Tensor | None
) -> None:
    """Step one parameter with given ``factors``."""
    columns = [[weight], [grad], [first], [second], [shares if beside is None else beside], [shares]]
    _launch(columns, (shares,) * 3, (decay, False, False), beside is not None, False)


def source(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    beside: Tensor | None,
    factors: Tensor,
    *,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool,
    out: list[Tensor] | None = None,
) -> Source:
    """Return a parameter after a step of Adam, which is taken where the matrix is read: once.

    Args:
        factors: of :func:`factors`, which hold the betas.
        out: buffers for what a kernel makes of it.
    Raises:
        ValueError: a tensor is not contiguous, or the kernels do not reach it.
    """
    tensors = (weight, grad, first, second, *(() if beside is None else (beside,)))
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError("a step that quantizes takes contiguous tensors")
    for x in tensors[:4]:
        check_input(x, 1)
    decay, kind = decay_of(weight_decay, decoupled), kind_of(beside)
    parameter = beside if beside is not None and kind == COPY else weight

    def step(_: Tensor | None) -> Tensor:
        step_one(factors, decay, weight, grad, first, second, beside)
        return parameter

    operands = (weight, grad, first, second, weight if beside is None else beside, factors)
    constants = ("adam", "", float(decay), float(kind), 0.0)
    return Source(tuple(weight.shape), parameter.dtype, operands, constants, step, out=out)


def parameter_of(source: Source) -> Tensor:
    """Return what the step of a :func:`source` leaves as the matrix."""
    return source.operands[4 if source.constants[3] == COPY else 0]


def kind_of(beside: Tensor | None) -> int:
    """Return what stands beside a weight: nothing, a copy, or the rest of its fp32 value."""
    return NOTHING if beside is None else REST if beside.dtype == torch.int16 else COPY


def decay_of(weight_decay: float, decoupled: bool) -> int:
    """Return which decay ``stepped`` computes."""
    return _NO_DECAY if not weight_decay else _OF_WEIGHTS if decoupled else _OF_GRADIENTS


def _launch(
    columns: list[list[Tensor]],
    shared: tuple[Tensor, ...],
    flags: tuple[Any, ...],
    beside: bool,
    ranges: bool,
    stochastic: bool = False,
) -> None:
    """Step up to eight parameters of the same dtypes; moments in uint8 are codes of groups."""
    sizes = [weight.numel() for weight in columns[0]]
    if not any(sizes):
        return
    coded = [ranges and column[0].dtype == torch.uint8 for column in columns[2:4]]
    block, tiles, launch = (BLOCK_CODED, _TILES.value, _step_coded) if any(coded) else (BLOCK, 1, _step)
    ends = list(itertools.accumulate(cdiv(n, block * tiles) for n in sizes))
    missing = AT_ONCE - len(sizes)
    if missing:  # no program is of these
        columns = [column + [column[0].new_empty(0)] * missing for column in columns]
        sizes += sizes[:1] * missing
        ends += ends[-1:] * missing
    kind = kind_of(columns[4][0] if beside else None)
    kind = RANDOM if stochastic and kind == NOTHING else kind
    _check_dtypes(
        column[0]
        for column, fits in zip(columns, (False, False, *coded, kind != COPY))
        if not fits
    )
    launch(
        (ends[-1], 1, 1),
        (*itertools.chain(*columns), *sizes, *ends[:-1], *shared),
        (kind, *flags, *coded, FLOAT8_BLOCK, max(sizes) >= _FEW, block),
    )


def _are_aligned(columns: list[list[Tensor]]) -> Iterable[bool]:
    """Return for each parameter whether all of its tensors are aligned."""
    if is_traced(columns[0][0]):
        return [all(is_aligned(x, 16) for x in tensors) for tensors in zip(*columns)]
    bits: Iterable[int] = map(Tensor.data_ptr, columns[0])
    for column in columns[1:]:
        bits = map(operator.or_, bits, map(Tensor.data_ptr, column))
    return [address % 16 == 0 for address in bits]


def _check_dtypes(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        if x.dtype not in HIGH_PRECISION:
            raise ValueError(f"cannot step {x.dtype}; use torch.float32, torch.bfloat16 or torch.float16")
