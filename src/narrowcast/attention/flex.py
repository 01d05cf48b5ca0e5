"""FlexAttention: one generated kernel for any rule of pairs and any function of a score, no matrix in memory.

PyTorch generates the kernel from two functions that are asked about one pair at a time: ``mask_mod``, whether a query
sees a key, and ``score_mod``, what becomes of a score. Here they read the same rule and places as every other backend
does. Blocks of 128 × 128 invisible pairs are skipped; which those are is computed from ``mask_mod`` at every
call, in the graph, because lengths may be tensors.

**FlexAttention is a kernel only when it is compiled.** Called in eager code it computes all scores in memory. So eager
code on a GPU calls :func:`_attend` compiled, once for this module, with PyTorch's own rules for recompiling: a first
call per set of options takes seconds, and sizes become dynamic when they change. One function serves all options of a
program, so its limit of recompilations is raised from PyTorch's 8 to ``LIMIT``; beyond it PyTorch raises, and nothing
falls back to scores in memory. Inside a compiled model the same function is traced as a part of it.

There is no backward on a CPU, so CPU tensors are computed elsewhere.

A sink is a logit without a value: it makes the denominator exp(lse) + exp(sink) instead of exp(lse), so the output is
that without a sink times sigmoid(lse - sink). ``lse`` has a gradient in FlexAttention.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ..upstream.compiler import compile_up_to
from .masks import Geometry, Tokens
from .scores import Scores

LIMIT = 128


def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, max_logit: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute attention by a generated kernel.

    Args:
        q: (b, h, s_q, d).
        k: (b, g, s_kv, d).
        v: (b, g, s_kv, d_v); g divides h.
        scores: without bias and dropout.
        max_logit: return the largest score of each head (h) in fp32, too.

    Returns:
        Output (b, h, s_q, d_v), zero where a query sees no key; the largest scores, without a gradient.
    """
    if torch.compiler.is_compiling() or not q.is_cuda:
        return _attend(q, k, v, scores, max_logit)
    return _compiled()(q, k, v, scores, max_logit)


@functools.cache
def _compiled() -> Any:
    return compile_up_to(_attend, LIMIT)


def _attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores, max_logit: bool) -> tuple[Tensor, Tensor | None]:
    places = _places(scores)
    wanted = AuxRequest(lse=scores.sink is not None, max_scores=max_logit)
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=_score_mod(scores, places),
        block_mask=_block_mask(q, k, scores, places),
        scale=scores.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=wanted,
    )
    if scores.sink is not None:
        assert aux.lse is not None
        share = torch.sigmoid(aux.lse - scores.sink.float()[None, :, None])
        out = (out * share[..., None]).to(q.dtype)
    return out, None if aux.max_scores is None else aux.max_scores.detach().amax((0, 2))


def _places(scores: Scores) -> Geometry | None:
    """Return where tokens stand, for the two functions.

    A shift that follows from sizes becomes a tensor: of dynamic sizes it is a symbol, which PyTorch 2.11 cannot lower
    as what they read.
    """
    places = scores.places
    if places is None or not scores.rule.bottom_right or isinstance(places.shift, Tensor):
        return places
    return dataclasses.replace(places, shift=places.q.position.new_full((), places.shift))


def _position(tokens: Tokens, index: Tensor) -> Tensor:
    """Return a token's position in its sequence; in whole rows, its index."""
    return tokens.position[0, index] if tokens.moved else index


def _distance(places: Geometry, b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Return how far a key is to the right of the query's diagonal."""
    distance = _position(places.kv, kv) - _position(places.q, q)
    if isinstance(places.shift, int) or places.shift.dim() == 0:
        return distance - places.shift
    return distance - (places.shift[b, 0] if places.q.sequence is None else places.shift[0, q])


def _block_mask(q: Tensor, k: Tensor, scores: Scores, places: Geometry | None) -> BlockMask | None:
    """Return which pairs are seen; None if all are."""
    rule, masked_out = scores.rule, scores.masked_out
    if places is None:
        return None
    left, right = rule.window

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= 0) & (j >= 0)
        if rule.bounded:
            distance = _distance(places, b, i, j)
            if right >= 0:
                seen = seen & (distance <= right)
            if left >= 0:
                seen = seen & (distance >= -left)
        if places.q.sequence is not None and places.kv.sequence is not None:
            seen = seen & (places.q.sequence[0, i] == places.kv.sequence[0, j])
        for tokens, index in ((places.q, i), (places.kv, j)):
            if tokens.valid is not None:
                seen = seen & tokens.valid[b, index]
        if masked_out is not None:
            at = [index if size > 1 else 0 for index, size in zip((b, h, i, j), masked_out.shape)]
            seen = seen & ~masked_out[at[0], at[1], at[2], at[3]]
        return seen

    by_row = places.q.valid is not None and places.q.sequence is None
    by_row = by_row or (masked_out is not None and masked_out.shape[0] > 1)
    by_head = masked_out is not None and masked_out.shape[1] > 1
    return create_block_mask(
        mask_mod,
        q.shape[0] if by_row else None,
        q.shape[1] if by_head else None,
        q.shape[2],
        k.shape[2],
        device=q.device.type,
    )


def _score_mod(scores: Scores, places: Geometry | None) -> Any:
    """Return the function of a score; None without one."""
    user, tensors, slopes = scores.score_mod, scores.tensors, scores.slopes
    if user is None and slopes is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sequence = b if places is None or places.q.sequence is None else places.q.sequence[0, i]
        if user is not None and places is None:
            score = user(score, b, h, i, j, **tensors)
        elif user is not None and places is not None:
            score = user(score, sequence, h, _position(places.q, i), _position(places.kv, j), **tensors)
        if slopes is not None and places is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[sequence, h]
            score = score - slope * _distance(places, b, i, j).abs()
        return score

    return score_mod
