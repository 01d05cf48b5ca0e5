"""Attention whose queries do not depend on each other: every query meets the keys in tiles of fixed places, in order.

A tile of keys that a query does not see changes nothing of it, so a query has the same bits alone and beside others,
whichever tiles the others need. Rows of a tile are the queries of the heads that share keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import EMULATE, operand, round_to_dtype
from .launch import Launcher, check_device

ROWS, KEYS = 64, 64
"""Tile of the forward. The bits depend on both."""
BACKWARD_ROWS, BACKWARD_KEYS = 64, 64
LARGEST_HEAD = 128
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_COLUMNS: tl.constexpr = tl.constexpr(16)
"""Columns of the matrix of ones: the fewest that a product takes."""


@triton.jit
def _product(a, b):
    return tl.dot(operand(a), operand(b))


@triton.jit
def _rows(ptr, offsets, inside, CHECKED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of a matrix, zero where there is none; ``WIDTH``: ``D``, rounded up to a power of two."""
    column = tl.arange(0, WIDTH)
    at = ptr + offsets[:, None] + column[None, :]
    if not CHECKED and D == WIDTH:
        return tl.load(at)
    there = (column < D)[None, :]
    if CHECKED:
        there = there & inside[:, None]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _store_rows(ptr, offsets, inside, values, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    there = inside[:, None] & (column < D)[None, :]
    rounded = round_to_dtype(values, ptr.dtype.element_ty)
    tl.store(ptr + offsets[:, None] + column[None, :], rounded, mask=there)


@triton.jit
def _queries(row, rows, head, GROUP: tl.constexpr):
    """Return of rows, the queries of the heads that share ``head`` of keys: which exist, their query, own head, and
    the query as an offset.
    """
    there = row < rows
    query = row // GROUP
    own = head * GROUP + row % GROUP
    return there, query, own, query.to(tl.int64)


@triton.jit
def _hidden(
    pairs, query, key, S_KV, left, right, shift, hk, there, MASK: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Return which pairs are not seen. ``MASK``: a tensor says it; ``WINDOW``: the distance from the diagonal."""
    hidden = (key >= S_KV)[None, :] | (query < 0)[:, None]
    if MASK:
        seen = there[:, None] & (key < S_KV)[None, :]
        hidden = hidden | (
            tl.load(pairs[:, None] + (key.to(tl.int64) * hk)[None, :], mask=seen, other=1) != 0
        )
    if WINDOW:
        distance = key[None, :] - query[:, None] - shift
        hidden = hidden | ((distance > right) & (right >= 0)) | ((distance < -left) & (left >= 0))
    return hidden


@triton.jit
def _keys_seen(
    first, last, S_KV, left, right, shift, MASK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return where the keys begin that queries from ``first`` to ``last`` see, as a tile does; to where each query
    sees all; and where they end.
    """
    begin = S_KV * 0
    whole = S_KV
    end = S_KV
    if WINDOW:
        begin = tl.where(left >= 0, tl.maximum(first + shift - left, 0) // TILE * TILE, begin)
        end = tl.where(right >= 0, tl.maximum(tl.minimum(S_KV, last + shift + right + 1), 0), end)
        whole = tl.where(right >= 0, tl.maximum(tl.minimum(S_KV, first + shift + right + 1), 0), whole)
        whole = tl.where(left >= 0, begin, whole)
    if MASK:
        whole = begin
    return begin, tl.maximum(whole // TILE * TILE, begin), end


@triton.jit
def _step(
    out, total, top, ones, q, k_ptr, v_ptr, pairs, start, query, there, S_KV, scale, left, right, shift, ks, vs, hk,
    CHECKED: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys; ``CHECKED``: some query may not see some."""
    key = start + tl.arange(0, TILE)
    k = _rows(k_ptr, key.to(tl.int64) * ks, key < S_KV, CHECKED, D, WIDTH)
    v = _rows(v_ptr, key.to(tl.int64) * vs, key < S_KV, CHECKED, D_V, WIDTH_V)
    scores = _product(q, tl.trans(k)) * scale
    if CHECKED:
        hidden = _hidden(pairs, query, key, S_KV, left, right, shift, hk, there, MASK, WINDOW)
        scores = tl.where(hidden, float("-inf"), scores)
        if MASK:  # what nobody sees may be anything
            v = tl.where((tl.min(hidden.to(tl.int32), axis=0) == 0)[:, None], v, 0.0).to(v.dtype)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = round_to_dtype(tl.exp2(scores - base[:, None]), v.dtype)
    rest = tl.exp2(top - base)[:, None]
    # tl.sum would add in another order where a mask is loaded: with the layout that the compiler takes
    total = tl.fma(total, tl.broadcast_to(rest, total.shape), _product(weights, ones))
    out = tl.fma(out, tl.broadcast_to(rest, out.shape), _product(weights, v))
    return out, total, higher


@triton.jit(do_not_specialize=["left", "right", "shift"])
def _forward_kernel(
    out_ptr, lse_ptr, top_ptr, q_ptr, k_ptr, v_ptr, hidden_ptr, S_Q, S_KV, HEADS, scale, left, right, shift,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, hb, hh, hs, hk,
    GROUP: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)  # of keys
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M  # the last queries see the most, and begin
    there, query, own, at = _queries(m0 + tl.arange(0, TILE_M), S_Q * GROUP, head, GROUP)
    q = _rows(q_ptr + batch * qb, own * qh + at * qs, there, True, D, WIDTH)
    k_ptr += batch * kb + head * kh
    v_ptr += batch * vb + head * vh
    pairs = hidden_ptr + batch * hb + own * hh + at * hs
    begin, whole, end = _keys_seen(
        m0 // GROUP, (m0 + TILE_M - 1) // GROUP, S_KV, left, right, shift, MASK, WINDOW, TILE_N
    )
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    ones = tl.full([TILE_N, _COLUMNS], 1.0, tl.float32 if EMULATE else v_ptr.dtype.element_ty)
    total = tl.zeros([TILE_M, _COLUMNS], tl.float32)  # in every column the same
    out = tl.zeros([TILE_M, WIDTH_V], tl.float32)
    for start in tl.range(begin, whole, TILE_N):
        out, total, top = _step(
            out, total, top, ones, q, k_ptr, v_ptr, pairs, start, query, there, S_KV, scale, left, right, shift,
            ks, vs, hk, False, MASK, WINDOW, D, WIDTH, D_V, WIDTH_V, TILE_N,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE_N):
        out, total, top = _step(
            out, total, top, ones, q, k_ptr, v_ptr, pairs, start, query, there, S_KV, scale, left, right, shift,
            ks, vs, hk, True, MASK, WINDOW, D, WIDTH, D_V, WIDTH_V, TILE_N,
        )  # fmt: skip
    total = tl.max(total, axis=1)
    total = tl.where(total == 0.0, 1.0, total)
    place = (batch * HEADS * GROUP + own) * S_Q + at
    _store_rows(out_ptr, place * D_V, there, out / total[:, None], D_V, WIDTH_V)
    tl.store(top_ptr + place, top * _LN_2, mask=there)
    tl.store(lse_ptr + place, tl.where(top == float("-inf"), 0.0, (top + tl.log2(total)) * _LN_2), mask=there)


@triton.jit
def _gradient_of_scores(
    q, k, v, grad, lse, delta, pairs, query, key, there, S_KV, scale, left, right, shift, hk,
    MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile and the gradient of its products of queries and keys, but for the scale."""
    weights = tl.exp2(_product(q, tl.trans(k)) * scale - lse[:, None])
    hidden = _hidden(pairs, query, key, S_KV, left, right, shift, hk, there, MASK, WINDOW)
    weights = tl.where(hidden, 0.0, weights)
    slope = weights * (_product(grad, tl.trans(v)) - delta[:, None])
    return round_to_dtype(weights, q.dtype), round_to_dtype(slope, q.dtype)


@triton.jit(do_not_specialize=["left", "right", "shift"])
def _query_gradient_kernel(
    dq_ptr, grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, hidden_ptr, S_Q, S_KV, HEADS, scale, scale_out,
    left, right, shift, qb, qh, qs, kb, kh, ks, vb, vh, vs, hb, hh, hs, hk,
    GROUP: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    there, query, own, at = _queries(m0 + tl.arange(0, TILE_M), S_Q * GROUP, head, GROUP)
    place = (batch * HEADS * GROUP + own) * S_Q + at
    q = _rows(q_ptr + batch * qb, own * qh + at * qs, there, True, D, WIDTH)
    grad = _rows(grad_ptr, place * D_V, there, True, D_V, WIDTH_V)
    lse = tl.load(lse_ptr + place, mask=there, other=0.0) * _LOG2_E
    delta = tl.load(delta_ptr + place, mask=there, other=0.0)
    k_ptr += batch * kb + head * kh
    v_ptr += batch * vb + head * vh
    pairs = hidden_ptr + batch * hb + own * hh + at * hs
    seen = _keys_seen(m0 // GROUP, (m0 + TILE_M - 1) // GROUP, S_KV, left, right, shift, MASK, WINDOW, TILE_N)
    dq = tl.zeros([TILE_M, WIDTH], tl.float32)
    for start in tl.range(seen[0], seen[2], TILE_N):
        key = start + tl.arange(0, TILE_N)
        k = _rows(k_ptr, key.to(tl.int64) * ks, key < S_KV, True, D, WIDTH)
        v = _rows(v_ptr, key.to(tl.int64) * vs, key < S_KV, True, D_V, WIDTH_V)
        made = _gradient_of_scores(
            q, k, v, grad, lse, delta, pairs, query, key, there, S_KV, scale, left, right, shift, hk, MASK, WINDOW,
        )  # fmt: skip
        dq += _product(made[1], k)
    _store_rows(dq_ptr, place * D, there, dq * scale_out, D, WIDTH)


@triton.jit(do_not_specialize=["left", "right", "shift"])
def _key_gradient_kernel(
    dk_ptr, dv_ptr, grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, hidden_ptr, S_Q, S_KV, HEADS, scale, scale_out,
    left, right, shift, qb, qh, qs, kb, kh, ks, vb, vh, vs, hb, hh, hs, hk,
    GROUP: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    D_V: tl.constexpr, WIDTH_V: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    n0 = tl.program_id(0) * TILE_N
    key = n0 + tl.arange(0, TILE_N)
    inside = key < S_KV
    k = _rows(k_ptr + batch * kb + head * kh, key.to(tl.int64) * ks, inside, True, D, WIDTH)
    v = _rows(v_ptr + batch * vb + head * vh, key.to(tl.int64) * vs, inside, True, D_V, WIDTH_V)
    rows = S_Q * GROUP
    begin = rows * 0
    end = rows
    if WINDOW:  # queries that see a key of the tile
        begin = tl.where(right >= 0, tl.maximum(n0 - right - shift, 0) * GROUP // TILE_M * TILE_M, begin)
        end = tl.where(left >= 0, tl.maximum(tl.minimum(S_Q, n0 + TILE_N + left - shift), 0) * GROUP, end)
    dk = tl.zeros([TILE_N, WIDTH], tl.float32)
    dv = tl.zeros([TILE_N, WIDTH_V], tl.float32)
    for start in tl.range(begin, end, TILE_M):
        there, query, own, at = _queries(start + tl.arange(0, TILE_M), rows, head, GROUP)
        place = (batch * HEADS * GROUP + own) * S_Q + at
        q = _rows(q_ptr + batch * qb, own * qh + at * qs, there, True, D, WIDTH)
        grad = _rows(grad_ptr, place * D_V, there, True, D_V, WIDTH_V)
        lse = tl.load(lse_ptr + place, mask=there, other=0.0) * _LOG2_E
        delta = tl.load(delta_ptr + place, mask=there, other=0.0)
        weights, slope = _gradient_of_scores(
            q, k, v, grad, lse, delta, hidden_ptr + batch * hb + own * hh + at * hs, query, key, there, S_KV,
            scale, left, right, shift, hk, MASK, WINDOW,
        )  # fmt: skip
        dv += _product(tl.trans(weights), grad)
        dk += _product(tl.trans(slope), q)
    place = ((batch * HEADS + head) * S_KV + key).to(tl.int64)
    _store_rows(dk_ptr, place * D, inside, dk * scale_out, D, WIDTH)
    _store_rows(dv_ptr, place * D_V, inside, dv, D_V, WIDTH_V)


_forward = Launcher(_forward_kernel, num_warps=4, num_stages=3)
_query_gradient = Launcher(_query_gradient_kernel, num_warps=4, num_stages=2)
_key_gradient = Launcher(_key_gradient_kernel, num_warps=4, num_stages=2)


def _facts(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, window: tuple[int, int, int]
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[object, ...]]:
    """Return the tensors as kernels read them, their strides, and constants."""
    check_device(q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}; give bf16 or fp16, one for all")
        if x.shape[-1] > LARGEST_HEAD:
            raise ValueError(f"{name} has head dim {x.shape[-1]}; the kernel takes at most {LARGEST_HEAD}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    pairs = (
        q
        if hidden is None
        else hidden.view(torch.uint8).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    )
    strides = (
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0,) * 4 if hidden is None else pairs.stride()),
    )
    dims = [(x.shape[-1], max(triton.next_power_of_2(x.shape[-1]), 16)) for x in (q, v)]
    windowed = window[0] >= 0 or window[1] >= 0
    return (
        (q, k, v, pairs),
        strides,
        (q.shape[1] // k.shape[1], hidden is not None, windowed, *dims[0], *dims[1]),
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, left: int, right: int, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.batch_invariant_attention.attention`` in an order of its own.

    Weights are rounded before they multiply.

    Raises:
        ValueError: a tensor the kernel cannot reach, no bf16 or fp16, or a head dim above 128.
    """
    (q, k, v, pairs), strides, constants = _facts(q, k, v, hidden, (left, right, shift))
    b, h, queries = q.shape[:3]
    out = torch.empty((b, h, queries, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse, top = (torch.empty((b, h, queries), dtype=torch.float32, device=q.device) for _ in range(2))
    if lse.numel():
        heads = k.shape[1]
        _forward(
            (cdiv(queries * h // heads, ROWS), b * heads, 1),
            (
                out,
                lse,
                top,
                q,
                k,
                v,
                pairs,
                queries,
                k.shape[2],
                heads,
                scale * _LOG2_E.value,
                left,
                right,
                shift,
                *strides,
            ),
            (*constants, ROWS, KEYS),
        )
    return out, lse, top


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    hidden: Tensor | None,
    scale: float,
    left: int,
    right: int,
    shift: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference.batch_invariant_attention.attention_backward``."""
    (q, k, v, pairs), strides, constants = _facts(q, k, v, hidden, (left, right, shift))
    grad, heads = grad.contiguous(), k.shape[1]
    delta = (grad.float() * out.float()).sum(-1)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not lse.numel() or not k.numel():
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        rest = (
            lse,
            delta,
            pairs,
            q.shape[2],
            k.shape[2],
            heads,
            scale * _LOG2_E.value,
            scale,
            left,
            right,
            shift,
            *strides,
        )
        tiles = (*constants, BACKWARD_ROWS, BACKWARD_KEYS)
        rows = q.shape[2] * q.shape[1] // heads
        _query_gradient((cdiv(rows, BACKWARD_ROWS), q.shape[0] * heads, 1), (dq, grad, q, k, v, *rest), tiles)
        _key_gradient(
            (cdiv(k.shape[2], BACKWARD_KEYS), k.shape[0] * heads, 1), (dk, dv, grad, q, k, v, *rest), tiles
        )
    return dq, dk, dv
