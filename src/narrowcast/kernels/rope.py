"""Rotary embeddings: one program per token and a few of its heads; forward and backward differ in the sines' sign."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import EMULATE, magnitude, product, round_to_dtype, to_float32
from .graph_amax import keep_amax, takes_amax
from .launch import Launcher, check_device

TILE = 1024


@triton.jit
def _widened(x):
    if EMULATE:
        return to_float32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    here,
    cos_ptr,
    sin_ptr,
    R,
    D,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Return heads that begin at the pointers ``x_ptr`` and ``y_ptr`` (heads, 1), where ``here`` (heads, 1) says so.

    Returns magnitudes of what is written, (heads, PAIRS), the largest among them.
    """
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    i = tl.arange(0, PAIRS)[None, :]
    inside = i < R
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + R
    c_a = tl.load(cos_ptr + first, mask=inside, other=0.0)
    c_b = tl.load(cos_ptr + second, mask=inside, other=0.0)
    s_a = tl.load(sin_ptr + first, mask=inside, other=0.0)
    s_b = tl.load(sin_ptr + second, mask=inside, other=0.0)
    if INVERSE:
        s_a, s_b = -s_b, -s_a
    inside = inside & here
    a = _widened(tl.load(x_ptr + first, mask=inside, other=0.0))
    b = _widened(tl.load(x_ptr + second, mask=inside, other=0.0))
    y_a = product(c_a, a) - product(s_a, b)
    y_b = product(c_b, b) + product(s_b, a)
    y_a, y_b = round_to_dtype(y_a, DTYPE), round_to_dtype(y_b, DTYPE)
    tl.store(y_ptr + first, y_a, mask=inside)
    tl.store(y_ptr + second, y_b, mask=inside)
    size = tl.where(inside, tl.maximum(magnitude(y_a), magnitude(y_b)), 0.0)
    if REST:
        behind = 2 * R + tl.arange(0, REST)[None, :]
        inside = (behind < D) & here
        rest = tl.load(x_ptr + behind, mask=inside, other=0.0)
        tl.store(y_ptr + behind, rest, mask=inside)
        size = tl.maximum(size, tl.max(magnitude(rest), axis=1)[:, None])
    return size


@triton.jit
def _place(row, positions_ptr, S, B, by_row, PLACED: tl.constexpr, SEQUENCE_FIRST: tl.constexpr):
    """Sequence, index in it, and position of a token."""
    if SEQUENCE_FIRST:
        s = row // B
        b = row - s * B
    else:
        b = row // S
        s = row - b * S
    position = s.to(tl.int64)
    if PLACED:
        position = tl.load(positions_ptr + b.to(tl.int64) * by_row + s)
    return b.to(tl.int64), s.to(tl.int64), position


@triton.jit
def _rope_rotate_kernel(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    S,
    B,
    H,
    D,
    R,
    stride_b,
    stride_s,
    stride_h,
    by_row,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    PLACED: tl.constexpr,
    SEQUENCE_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    row = tl.program_id(0)
    b, s, position = _place(row, positions_ptr, S, B, by_row, PLACED, SEQUENCE_FIRST)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    x_ptr += b * stride_b + s * stride_s + head.to(tl.int64) * stride_h
    y_ptr += (row.to(tl.int64) * H + head) * D
    table = position * (2 * R)
    _turn(x_ptr, y_ptr, head < H, cos_ptr + table, sin_ptr + table, R, D, PAIRS, REST, INTERLEAVED, INVERSE)


@triton.jit
def _rope_qkv_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    partials_ptr,
    q_cos_ptr,
    q_sin_ptr,
    k_cos_ptr,
    k_sin_ptr,
    positions_ptr,
    S,
    B,
    G,
    Q,
    D,
    V,
    R_Q,
    R_K,
    by_row,
    GROUPS: tl.constexpr,
    PAIRS_Q: tl.constexpr,
    PAIRS_K: tl.constexpr,
    REST_Q: tl.constexpr,
    REST_K: tl.constexpr,
    VALUES: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PLACED: tl.constexpr,
    SEQUENCE_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    AMAX: tl.constexpr,
):
    row = tl.program_id(0)
    _, _, position = _place(row, positions_ptr, S, B, by_row, PLACED, SEQUENCE_FIRST)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    here = group < G
    at = row.to(tl.int64) * G + group
    whole = qkv_ptr + row.to(tl.int64) * G * ((Q + 1) * D + V)
    if BY_GROUP:  # each group's queries, key and value side by side
        queries = whole + group * ((Q + 1) * D + V)
        keys = queries + Q * D
        values = keys + D
    else:  # all queries, all keys, all values
        queries = whole + group * (Q * D)
        keys = whole + G * Q * D + group * D
        values = whole + G * (Q + 1) * D + group * V
    table = position * (2 * R_Q)
    largest = tl.zeros([GROUPS, PAIRS_Q], tl.float32)
    j = 0
    while j < Q:
        part, head = queries + j * D, q_ptr + (at * Q + j) * D
        if INVERSE:
            part, head = head, part
        size = _turn(
            part, head, here, q_cos_ptr + table, q_sin_ptr + table, R_Q, D, PAIRS_Q, REST_Q, INTERLEAVED, INVERSE,
        )  # fmt: skip
        if INVERSE:
            largest = tl.maximum(largest, size)
        j += 1
    table = position * (2 * R_K)
    part, head = keys, k_ptr + at * D
    value = tl.arange(0, VALUES)[None, :]
    inside = here & (value < V)
    packed, alone = values + value, v_ptr + at * V + value
    if INVERSE:
        part, head = head, part
    size = _turn(
        part, head, here, k_cos_ptr + table, k_sin_ptr + table, R_K, D, PAIRS_K, REST_K, INTERLEAVED, INVERSE
    )  # fmt: skip
    if INVERSE:
        packed, alone = alone, packed
    v = tl.load(packed, mask=inside, other=0.0)
    tl.store(alone, v, mask=inside)
    if AMAX:
        of_k = tl.maximum(tl.max(size), tl.max(magnitude(v)))
        program = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(partials_ptr + program, tl.maximum(tl.max(largest), of_k))


_rotate = Launcher(_rope_rotate_kernel, num_warps=4)
_qkv = Launcher(_rope_qkv_kernel, num_warps=4)


def _heads_per_program(heads: int, columns: int) -> int:
    """Return a tile of at least a quarter of ``TILE``, that each thread may take elements in pairs."""
    at_least, at_most = max(TILE // 4 // columns, 1), max(TILE // columns, 1)
    return min(max(triton.next_power_of_2(heads), at_least), at_most)


def _rest(dim: int, turned: int) -> int:
    return triton.next_power_of_2(dim - turned) if dim > turned else 0


def _pairs(turned: int) -> int:
    return max(triton.next_power_of_2(turned // 2), 16)


def _by_row(positions: Tensor) -> int:
    return 0 if positions.shape[0] == 1 else positions.stride(0)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    inverse: bool = False,
) -> Tensor:
    """Compute ``reference.rope.rotate``, equal to the byte."""
    check_device(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    placed, positions = positions is not None, cos if positions is None else positions.contiguous()
    (s, b), (stride_s, stride_b) = x.shape[:2], x.stride()[:2]
    if not sequence_first:
        s, b, stride_s, stride_b = b, s, stride_b, stride_s
    heads, dim, turned = x.shape[2], x.shape[3], cos.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        per = _heads_per_program(heads, _pairs(turned))
        _rotate(
            (s * b, cdiv(heads, per), 1),
            (
                x, y, cos, sin, positions, s, b, heads, dim, turned // 2, stride_b, stride_s, x.stride(2),
                _by_row(positions) if placed else 0,
            ),
            (
                per, _pairs(turned), _rest(dim, turned), placed, sequence_first, interleaved, inverse
            ),
        )  # fmt: skip
    return y


def rotate_qkv(
    qkv: Tensor,
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    widths: Sequence[int],
    by_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.rope.rotate_qkv``, equal to the byte."""
    check_device(qkv)
    qkv, lead, (w_q, w_k, w_v) = qkv.contiguous(), qkv.shape[:2], widths
    groups = qkv.shape[2]
    shapes = ((groups * w_q // w_k, w_k), (groups, w_k), (groups, w_v))
    parts = tuple(torch.empty((*lead, *shape), dtype=qkv.dtype, device=qkv.device) for shape in shapes)
    _run_qkv(qkv, parts, tables, positions, sequence_first, interleaved, by_group, False)
    return parts[0], parts[1], parts[2]


def rotate_qkv_backward(
    grads: Sequence[Tensor],
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    by_group: bool,
) -> Tensor:
    """Compute ``reference.rope.rotate_qkv_backward``, equal to the byte."""
    q, k, v = (grad.contiguous() for grad in grads)
    check_device(q)
    width = q.shape[2] // k.shape[2] * q.shape[3] + k.shape[3] + v.shape[3]
    qkv = torch.empty((*k.shape[:3], width), dtype=q.dtype, device=q.device)
    _run_qkv(qkv, (q, k, v), tables, positions, sequence_first, interleaved, by_group, True)
    return qkv


def _run_qkv(
    qkv: Tensor,
    parts: Sequence[Tensor],
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    by_group: bool,
    inverse: bool,
) -> None:
    if not qkv.numel():
        return
    q, k, v = parts
    tables = [table.contiguous() for table in tables]
    placed, positions = positions is not None, tables[0] if positions is None else positions.contiguous()
    s, b = (qkv.shape[0], qkv.shape[1]) if sequence_first else (qkv.shape[1], qkv.shape[0])
    groups, dim, dim_v = k.shape[2], k.shape[3], v.shape[3]
    of_q, of_k = tables[0].shape[1], tables[2].shape[1]
    per = _heads_per_program(groups, min(_pairs(of_q), _pairs(of_k)))
    programs = s * b * cdiv(groups, per)
    partials = qkv.new_empty(programs, dtype=torch.float32) if inverse and takes_amax(qkv) else None
    _qkv(
        (s * b, cdiv(groups, per), 1),
        (
            qkv, q, k, v, qkv if partials is None else partials, *tables, positions, s, b, groups,
            q.shape[2] // groups, dim, dim_v, of_q // 2, of_k // 2, _by_row(positions) if placed else 0,
        ),
        (
            per, _pairs(of_q), _pairs(of_k), _rest(dim, of_q), _rest(dim, of_k),
            max(triton.next_power_of_2(dim_v), 16), by_group, placed, sequence_first, interleaved, inverse,
            partials is not None,
        ),
    )  # fmt: skip
    if partials is not None:
        keep_amax(qkv, partials)
