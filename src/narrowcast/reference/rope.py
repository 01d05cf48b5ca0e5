"""Rotary embeddings: pairs of channels turned by the angles of their positions, and turned back for the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    inverse: bool = False,
) -> Tensor:
    """Turn the first channels of every head.

    Args:
        x: (b, s, h, d), with ``sequence_first`` (s, b, h, d); bf16, fp16 or fp32, any strides.
        cos, sin: (positions, r) in fp32, r even and at most d.
        positions: (b or 1, s) int64, rows of ``cos``; None: 0, 1, ... in each sequence.
        interleaved: a pair is channels 2i and 2i + 1, else i and i + r/2.
        inverse: the transposed map, which takes a gradient of the result to that of ``x``.

    Returns:
        As ``x``, contiguous.

    Numerics:
        Of a pair (a, b): (c_a a - s_a b, c_b b + s_b a), and the transposed of that. Products and their sum in fp32,
        one rounding at the end; the channels behind are copied.
    """
    places = torch.arange(x.shape[0 if sequence_first else 1], device=x.device)[None]
    places = places if positions is None else positions
    places = places.t() if sequence_first else places
    turned = cos.shape[1]
    first = torch.arange(turned // 2, device=x.device)
    first, second = (2 * first, 2 * first + 1) if interleaved else (first, first + turned // 2)
    c_a, c_b, s_a, s_b = (
        table[places][..., at][:, :, None] for table in (cos, sin) for at in (first, second)
    )
    if inverse:
        s_a, s_b = -s_b, -s_a
    a, b = x[..., first].float(), x[..., second].float()
    y = x.clone(memory_format=torch.contiguous_format)
    y[..., first] = (c_a * a - s_a * b).to(x.dtype)
    y[..., second] = (c_b * b + s_b * a).to(x.dtype)
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
    """Return queries, keys and values out of one tensor, the first two turned.

    Args:
        qkv: (b, s, g, w_q + w_k + w_v), with ``sequence_first`` (s, b, g, ...).
        tables: cos and sin of queries, cos and sin of keys, as of ``rotate``.
        widths: (w_q, w_k, w_v); w_k is the head dim of queries and keys, and divides w_q.
        by_group: of each group its queries, key and value; else all queries, then all keys, then all values.

    Returns:
        Queries (b, s, g w_q / w_k, w_k), keys (b, s, g, w_k), values (b, s, g, w_v), contiguous.
    """
    if by_group:
        q, k, v = qkv.split(list(widths), -1)
        q = q.unflatten(-1, (-1, widths[1])).flatten(2, 3)
    else:
        parts = qkv.flatten(2).split([qkv.shape[2] * width for width in widths], -1)
        q, k, v = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, (widths[1], *widths[1:])))
    how = (positions, sequence_first, interleaved)
    return (
        rotate(q, tables[0], tables[1], *how),
        rotate(k, tables[2], tables[3], *how),
        v.clone(memory_format=torch.contiguous_format),
    )


def rotate_qkv_backward(
    grads: Sequence[Tensor],
    tables: Sequence[Tensor],
    positions: Tensor | None,
    sequence_first: bool,
    interleaved: bool,
    by_group: bool,
) -> Tensor:
    """Return the gradient of ``qkv``, contiguous, of those of the three results of ``rotate_qkv``."""
    how = (positions, sequence_first, interleaved, True)
    q = rotate(grads[0], tables[0], tables[1], *how)
    k = rotate(grads[1], tables[2], tables[3], *how)
    if not by_group:
        whole = torch.cat([part.flatten(2) for part in (q, k, grads[2])], -1)
        return whole.unflatten(-1, (k.shape[2], -1))
    groups, width = k.shape[2], q.shape[2] // k.shape[2] * q.shape[3]
    return torch.cat((q.reshape(*q.shape[:2], groups, width), k, grads[2]), -1)
