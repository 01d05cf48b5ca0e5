"""Attention of one query per sequence to a KV cache, which takes the time that the cached bytes take.

All query heads of a group are the rows of one tile, so every key and value is read once. The keys of a sequence are
split among programs, since there may be few sequences and heads. Each keeps the largest of its scores, the sum of the
exponentials below it and the values in their proportion; ``_join_kernel`` adds these parts in order (Dao et al.,
Flash-Decoding, 2023). Where a sequence ends is read on the device, and so no masked key is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codecs import operand, round_to_dtype
from .launch import TENSOR, Launch, Launcher, beside, check_device, contiguous, remembered

LOG2_E = 1.4426950408889634


@triton.jit
def _add_sink(sink_ptr, heads, here, top, total, LOG2_E: tl.constexpr):
    """Return the largest score with the sink's, the factor of what was summed below the old one, and the sum."""
    sink = tl.load(sink_ptr + heads, mask=here, other=0.0) * LOG2_E
    new = tl.maximum(top, sink)
    factor = tl.exp2(top - new)
    return factor, total * factor + tl.exp2(sink - new)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["cu_q_ptr", "cu_kv_ptr"])
def _decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_q_ptr,
    cu_kv_ptr,
    sink_ptr,
    out_ptr,
    sums_ptr,
    scale,
    window,
    G,
    D,
    V,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    program, part = tl.program_id(0), tl.program_id(1)
    batch, group = program // G, program % G
    length = tl.load(cu_kv_ptr + batch + 1) - tl.load(cu_kv_ptr + batch)
    if tl.load(cu_q_ptr + batch + 1) == tl.load(cu_q_ptr + batch):
        length = 0
    first = tl.maximum(length - 1 - window, 0) if WINDOW else 0
    per = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    first += part * per
    last = tl.minimum(first + per, length)
    row, i, j, n = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, VALUES), tl.arange(0, BLOCK)
    here = row < GROUP
    head = program * GROUP + row
    q = operand(
        tl.load(q_ptr + head[:, None] * D + i[None, :], mask=here[:, None] & (i < D)[None, :], other=0.0)
    )
    k_at = k_ptr + batch.to(tl.int64) * k_batch + group * k_head + i[:, None]
    v_at = v_ptr + batch.to(tl.int64) * v_batch + group * v_head + j[None, :]
    unit = tl.cast(scale, tl.float32)  # a graph passes floats in fp64
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUES], tl.float32)
    for start in range(first, last, BLOCK):
        place = start + n
        inside = place < last
        keys_there, values_there = inside[None, :], inside[:, None]
        if not EVEN:
            keys_there = keys_there & (i < D)[:, None]
            values_there = values_there & (j < V)[None, :]
        k = operand(tl.load(k_at + place[None, :].to(tl.int64) * k_row, mask=keys_there, other=0.0))
        v = operand(tl.load(v_at + place[:, None].to(tl.int64) * v_row, mask=values_there, other=0.0))
        score = tl.dot(q, k, input_precision="ieee") * unit
        score = tl.where(inside[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new[:, None])
        factor = tl.exp2(top - new)
        total = total * factor + tl.sum(weight, axis=1)
        out = out * factor[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new
    there = here[:, None] & (j < V)[None, :]
    if SPLITS == 1:
        if SINK:
            factor, total = _add_sink(sink_ptr, group * GROUP + row, here, top, total, LOG2_E)
            out = out * factor[:, None]
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out_ptr + head[:, None] * V + j[None, :], round_to_dtype(out, DTYPE), mask=there)
    else:
        at = head * SPLITS + part
        tl.store(out_ptr + at[:, None] * V + j[None, :], out, mask=there)
        tl.store(sums_ptr + at * 2, top, mask=here)
        tl.store(sums_ptr + at * 2 + 1, total, mask=here)


@triton.jit
def _join_kernel(
    parts_ptr,
    sums_ptr,
    sink_ptr,
    out_ptr,
    H,
    V,
    VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    SINK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    head = tl.program_id(0)
    part, j = tl.arange(0, SPLITS), tl.arange(0, VALUES)
    at = head * SPLITS + part
    tops = tl.load(sums_ptr + at * 2)
    top = tl.max(tops, axis=0)
    if SINK:
        sink = tl.load(sink_ptr + head % H) * LOG2_E
        top = tl.maximum(top, sink)
    factor = tl.where(tops == float("-inf"), 0.0, tl.exp2(tops - top))
    total = tl.sum(tl.load(sums_ptr + at * 2 + 1) * factor, axis=0)
    if SINK:
        total += tl.exp2(sink - top)
    parts = tl.load(parts_ptr + at[:, None] * V + j[None, :], mask=(j < V)[None, :], other=0.0)
    out = tl.sum(parts * factor[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + head * V + j, round_to_dtype(out, DTYPE), mask=j < V)


BLOCK = 64
PROGRAMS = 528  # of which a GPU's multiprocessors hold some four each
LEAST = 128  # keys of a part
MOST_SPLITS = 64

_attend = Launcher(_decode_attention_kernel, num_warps=4, num_stages=2, enable_fp_fusion=True)
_join = Launcher(_join_kernel, num_warps=4, enable_fp_fusion=True)


def splits_of(programs: int, keys: int) -> int:
    """Return among how many programs the keys of a sequence are split, a power of two."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits * 2 <= PROGRAMS and keys // (splits * 2) >= LEAST:
        splits *= 2
    return splits


@remembered
def _launches(
    batch: int,
    heads: int,
    keys: int,
    groups: int,
    dims: tuple[int, int],
    strides: tuple[int, ...],
    sink: bool,
    scale: float,
    window: int,
) -> tuple[int, Launch, Launch | None]:
    """Return the number of parts, the launch that makes them, and the one that adds them, if there are several."""
    D, V = dims
    splits = splits_of(batch * groups, keys if window < 0 else min(keys, window + 1))
    DIM, VALUES = (max(triton.next_power_of_2(dim), 16) for dim in dims)
    rows, joins = max(triton.next_power_of_2(heads // groups), 16), splits > 1
    taken = sink and not joins
    arguments: list[Any] = [TENSOR] * 5 + [TENSOR if taken else None, TENSOR, TENSOR if joins else None]
    arguments += [scale * LOG2_E, window, groups, D, V, *strides]
    sizes = heads // groups, rows, BLOCK, DIM, VALUES, (DIM, VALUES) == dims
    constants = (*sizes, splits, window >= 0, taken, LOG2_E)
    attend_ = Launch(_attend, (batch * groups, splits, 1), arguments, constants)
    if not joins:
        return 1, attend_, None
    arguments = [TENSOR, TENSOR, TENSOR if sink else None, TENSOR, heads, V]
    constants = (VALUES, splits, sink, LOG2_E)
    return splits, attend_, Launch(_join, (batch * heads, 1, 1), arguments, constants)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    sink: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    """Compute ``reference.decode_attention.attend`` but for the order of sums; weights are rounded to ``v``'s dtype."""
    check_device(q)
    q = q.contiguous()
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    (batch, heads, _), (keys, groups), dim_v = q.shape, k.shape[1:3], v.shape[3]
    strides = (*k.stride()[:3], *v.stride()[:3])
    splits, attend_, join = _launches(
        q, batch, heads, keys, groups, (q.shape[2], dim_v), strides, sink is not None, scale, window
    )
    new = beside(q)
    out: Any = new(*contiguous((batch, heads, dim_v)), q.dtype)
    sinks = [] if sink is None else [sink.contiguous()]
    tensors = [q, k, v, cu_seqlens_q, cu_seqlens_kv]
    if join is None:
        attend_([*tensors, *sinks, out])
        return out  # type: ignore[no-any-return]
    parts = new(*contiguous((batch * heads, splits, dim_v)), torch.float32)
    sums = new(*contiguous((batch * heads, splits, 2)), torch.float32)
    attend_([*tensors, parts, sums])
    join([parts, sums, *sinks, out])
    return out  # type: ignore[no-any-return]
