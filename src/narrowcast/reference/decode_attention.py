"""Attention of one query per sequence to its cached keys and values."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Return the softmax of scaled products times the values.

    Args:
        q: (b, h, d).
        k: (b, s, g, d); g divides h. A sequence has its tokens first.
        v: (b, s, g, d_v).
        cu_seqlens_q: (b + 1) int32 sums of the numbers of queries, 0 or 1.
        cu_seqlens_kv: (b + 1) int32 sums of the numbers of keys.
        sink: (h) in fp32, a logit that takes part in the softmax and has no value; None for none.
        window: earlier keys that a query sees beside the last; -1 for all.

    Returns:
        (b, h, d_v) in the dtype of ``q``; zeros without a query or a key.

    Numerics:
        Products, softmax and sums in fp32, rounded once.
    """
    there = torch.arange(k.shape[1], device=q.device)
    length, queries = cu_seqlens_kv.diff()[:, None], cu_seqlens_q.diff()[:, None]
    seen = (there < length) & (queries > 0)
    if window >= 0:
        seen &= there >= length - 1 - window
    keys, values = (
        torch.where(seen[:, :, None, None], x.float(), 0.0)
        .transpose(1, 2)
        .repeat_interleave(q.shape[1] // x.shape[2], 1)
        for x in (k, v)
    )
    logits = (keys @ q.float()[..., None])[..., 0] * scale
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    if sink is not None:
        logits = torch.cat((sink.expand(*logits.shape[:2])[..., None], logits), -1)
    weights = logits.softmax(-1).nan_to_num(0.0) if sink is None else logits.softmax(-1)[..., 1:]
    return (weights[..., None, :] @ values)[..., 0, :].to(q.dtype)
