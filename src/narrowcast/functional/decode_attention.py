"""``narrowcast::decode_attention``: one query per sequence against a KV cache."""

from __future__ import annotations

from ._library import always, define
from .numerics import computed_by

decode_attention = define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? sink, "
    "float scale, int window) -> Tensor",
    computed_by("decode_attention", "attend"),
    lambda q, k, v, *_: q.new_empty((*q.shape[:2], v.shape[3])),
    lowered=always,
)
"""Attention of one query per sequence; ``reference.decode_attention.attend`` says of what.

Returns:
    (b, h, d_v), contiguous.

Numerics:
    Softmax and sums in fp32. A GPU's kernel adds in another order and rounds the softmax's weights to the dtype of the
    values.
"""
