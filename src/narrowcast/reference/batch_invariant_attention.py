"""Attention whose queries do not depend on each other, nor on the number of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch_invariant import exponentials, log, matmul, mix
from .reduction import row_sum


def attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, left: int, right: int, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the logarithm of the sum and the largest of each query's scores.

    Args:
        q: (b, h, s_q, d), of one dtype with ``k`` and ``v``.
        k: (b, g, s_kv, d); g divides h.
        v: (b, g, s_kv, d_v).
        hidden: bools, broadcastable to (b, h, s_q, s_kv), True where a query does not see a key; None if it does.
        scale: of the products.
        left, right, shift: besides, query i sees keys from i + shift - left to i + shift + right; -1 for no bound.

    Numerics:
        Output (b, h, s_q, d_v) in the dtype of ``q``, zero where a query sees no key. Scores, weights and sums in fp32,
        by :mod:`.batch_invariant`: ``mix(softmax(matmul(q, k) * scale), v)``. Logarithms and largest scores (b, h, s_q)
        in fp32; 0 and -inf where a query sees no key.
    """
    logits = (matmul(_by_keys(q, k), k) * scale).masked_fill(
        _not_seen(q, k, hidden, left, right, shift), float("-inf")
    )
    e, highest = exponentials(logits)
    total = row_sum(e)[..., None]
    out = mix(e / total.masked_fill(total == 0, 1.0), v).to(q.dtype)
    lse = (log(total) + highest).masked_fill(total == 0, 0.0)
    top = highest.masked_fill(total == 0, float("-inf"))
    sizes = q.shape[:3]
    return out.view(*sizes, v.shape[-1]), lse.view(sizes), top.view(sizes)


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
    """Return the gradients of ``q``, ``k`` and ``v``.

    Args:
        grad: of the output.
        out, lse: what :func:`attention` returned.

    Numerics:
        In fp32, in the order of sums of the library's GEMMs; one rounding at the end.
    """
    rows, keys, values, d_out = (x.float() for x in (_by_keys(q, k), k, v, _by_keys(grad, k)))
    weights = (rows @ keys.mT * scale - _by_keys(lse[..., None], k)).exp()
    weights = weights.masked_fill(_not_seen(q, k, hidden, left, right, shift), 0.0)
    delta = (d_out * _by_keys(out, k).float()).sum(-1, keepdim=True)
    slope = weights * (d_out @ values.mT - delta) * scale
    dq = (slope @ keys).view(q.shape)
    return dq.to(q.dtype), (slope.mT @ rows).to(k.dtype), (weights.mT @ d_out).to(v.dtype)


def _by_keys(x: Tensor, k: Tensor) -> Tensor:
    """Return (b, h, s, n) as (b, g, h / g * s, n): the rows of heads that share keys, in one matrix."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _not_seen(q: Tensor, k: Tensor, hidden: Tensor | None, left: int, right: int, shift: int) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    index = torch.arange(max(queries, keys), device=q.device)
    distance = index[None, :keys] - index[:queries, None] - shift
    pairs = torch.zeros_like(distance, dtype=torch.bool) if hidden is None else hidden
    if right >= 0:
        pairs = pairs | (distance > right)
    if left >= 0:
        pairs = pairs | (distance < -left)
    return _by_keys(pairs.expand(*q.shape[:3], keys), k)
