"""Rotary embeddings in one kernel: of queries or keys, and of both in one packed tensor.

``cos`` and ``sin`` are tables (positions, channels) in fp32, ``positions`` (b or 1, s) int64 rows of them; all else as
of ``reference.rope``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._library import always, define
from .numerics import computed_by

rotate = define(
    "rotate(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool sequence_first, bool interleaved, bool inverse) "
    "-> Tensor",
    computed_by("rope", "rotate"),
    lambda x, *_: x.new_empty(x.shape),
    lowered=always,
)
"""``x`` (b, s, h, d), or (s, b, h, d), turned or turned back; contiguous."""


def _fake_qkv(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (w_q, w_k, w_v), groups = arguments[4], qkv.shape[2]
    shapes = ((groups * w_q // w_k, w_k), (groups, w_k), (groups, w_v))
    q, k, v = (qkv.new_empty((*qkv.shape[:2], *shape)) for shape in shapes)
    return q, k, v


rotate_qkv = define(
    "rotate_qkv(Tensor qkv, Tensor[] tables, Tensor? positions, bool sequence_first, bool interleaved, int[] widths, "
    "bool by_group) -> (Tensor, Tensor, Tensor)",
    computed_by("rope", "rotate_qkv"),
    _fake_qkv,
    lowered=always,
)
"""Queries, keys and values out of one tensor, the first two turned; ``tables`` are cos and sin of both."""


def _fake_qkv_backward(grads: Sequence[Tensor], *_: object) -> Tensor:
    q, k, v = grads
    width = q.shape[2] // k.shape[2] * q.shape[3] + k.shape[3] + v.shape[3]
    return torch.empty((*k.shape[:3], width), dtype=q.dtype, device=q.device)


rotate_qkv_backward = define(
    "rotate_qkv_backward(Tensor[] grads, Tensor[] tables, Tensor? positions, bool sequence_first, bool interleaved, "
    "bool by_group) -> Tensor",
    computed_by("rope", "rotate_qkv_backward"),
    _fake_qkv_backward,
    lowered=always,
)
"""Gradient of the packed tensor from those of the three results of :data:`rotate_qkv`."""
