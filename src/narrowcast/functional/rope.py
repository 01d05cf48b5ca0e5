"""Rotary embeddings in one kernel: of queries or keys, and of both in one packed tensor.

``cos`` and ``sin`` are tables (positions, channels) in fp32, ``positions`` (b or 1, s) int64 rows of them; all else as
of ``reference.rope``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._library import always, define
from .numerics import numerics_for


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    inverse: bool,
) -> Tensor:
    return numerics_for(x).rope.rotate(x, cos, sin, positions, sequence_first, interleaved, inverse)


rotate = define(
    "rotate(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool sequence_first, bool interleaved, bool inverse) "
    "-> Tensor",
    _rotate,
    lambda x, *_: x.new_empty(x.shape),
    inlined=always,
)
"""``x`` (b, s, h, d), or (s, b, h, d), turned or turned back; contiguous."""


def _rotate_qkv(
    qkv: Tensor,
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    widths: Sequence[int],
    by_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return numerics_for(qkv).rope.rotate_qkv(
        qkv, tables, positions, sequence_first, interleaved, widths, by_group
    )


def _fake_qkv(
    qkv: Tensor,
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    widths: Sequence[int],
    by_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (w_q, w_k, w_v), groups = widths, qkv.shape[2]
    shapes = ((groups * w_q // w_k, w_k), (groups, w_k), (groups, w_v))
    q, k, v = (qkv.new_empty((*qkv.shape[:2], *shape)) for shape in shapes)
    return q, k, v


rotate_qkv = define(
    "rotate_qkv(Tensor qkv, Tensor[] tables, Tensor? positions, bool sequence_first, bool interleaved, int[] widths, "
    "bool by_group) -> (Tensor, Tensor, Tensor)",
    _rotate_qkv,
    _fake_qkv,
    inlined=always,
)
"""Queries, keys and values out of one tensor, the first two turned; ``tables`` are cos and sin of both."""


def _rotate_qkv_backward(
    grads: Sequence[Tensor],
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    by_group: bool,
) -> Tensor:
    return numerics_for(grads[0]).rope.rotate_qkv_backward(
        grads, tables, positions, sequence_first, interleaved, by_group
    )


def _fake_qkv_backward(grads: Sequence[Tensor], *_: object) -> Tensor:
    q, k, v = grads
    width = q.shape[2] // k.shape[2] * q.shape[3] + k.shape[3] + v.shape[3]
    return torch.empty((*k.shape[:3], width), dtype=q.dtype, device=q.device)


rotate_qkv_backward = define(
    "rotate_qkv_backward(Tensor[] grads, Tensor[] tables, Tensor? positions, bool sequence_first, bool interleaved, "
    "bool by_group) -> Tensor",
    _rotate_qkv_backward,
    _fake_qkv_backward,
    inlined=always,
)
"""Gradient of the packed tensor from those of the three results of :data:`rotate_qkv`."""
