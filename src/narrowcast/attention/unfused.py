"""Attention in plain PyTorch with fp32 scores in memory, for every configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from .._determinism import DETERMINISM
from ..functional import (
    attention_batch_invariant,
    attention_is_one_operator,
    matmul_batch_invariant,
    mix_batch_invariant,
    softmax_batch_invariant,
)
from .masks import alibi_bias, hidden_pairs
from .scores import Scores


def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, max_logit: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the softmax of the scores times the values.

    Args:
        q: (b, h, s_q, d).
        k: (b, g, s_kv, d).
        v: (b, g, s_kv, d_v); g divides h.
        max_logit: return the largest scores.

    Returns:
        Output (b, h, s_q, d_v) in the dtype of ``q``, zero where a query sees no key; the largest score of each head
        (h) in fp32, without a gradient; None unless requested.

    Numerics:
        Products, softmax and sums in fp32; one rounding at the end. In the batch-invariant mode, those of
        ``reference.batch_invariant``: a query depends on itself and on the keys and values that it sees.
    """
    with torch.autocast(q.device.type, enabled=False):
        out, seen = _attend(q, k, v, scores)
        return out, _largest(seen, (0, *range(2, seen.dim()))) if max_logit else None


def _attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output, and all scores (b, h, s_q, s_kv) or the largest of each query, without a gradient."""
    group, invariant = q.shape[1] // k.shape[1], DETERMINISM.batch_invariant
    if invariant and _is_one_operator(q, k, v, scores):
        hidden, window = _pairs_and_window(scores)
        out, _, top = attention_batch_invariant(q, k, v, hidden, scores.scale, *window)
        return out, top
    if invariant:
        left, right = (q, k) if q.dtype == k.dtype else (q.float(), k.float())
        logits = (
            matmul_batch_invariant(_rows_of_group(left, group), right).view(*q.shape[:3], -1) * scores.scale
        )
    else:
        keys, values = (x.float().repeat_interleave(group, 1) if group > 1 else x.float() for x in (k, v))
        logits = q.float() @ keys.transpose(2, 3) * scores.scale
    logits = _modified(logits, scores)
    hidden = None if scores.places is None else hidden_pairs(scores.places, scores.rule, scores.masked_out)
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    seen = logits.detach()
    if invariant:
        weights = _softmax_in_order(logits, scores)
        out = mix_batch_invariant(_rows_of_group(weights, group), v).view(*q.shape[:3], -1)
        return out.to(q.dtype), seen
    # a row without any key has no largest score; any finite number in its place makes its weights zero
    top = _largest(seen, (3,), True).clamp(min=torch.finfo(torch.float32).min)
    sink = None if scores.sink is None else scores.sink.float()[None, :, None, None]
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    else:
        total = total.masked_fill(total == 0, 1.0)
    weights = weights / total
    if scores.dropout:
        weights = torch.nn.functional.dropout(weights, scores.dropout)
    return (weights @ values).to(q.dtype), seen


def _is_one_operator(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    """Return whether one operator computes scores, weights and output: nothing is done to the scores but hiding.

    Nothing else decides: a sampler's call, with other masks and sizes, must have the order of sums of a trainer's.
    """
    changed = scores.score_mod, scores.bias, scores.slopes, scores.sink
    return not scores.dropout and all(one is None for one in changed) and attention_is_one_operator(q, k, v)


def _pairs_and_window(scores: Scores) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Return the mask as a tensor of pairs and a window around the diagonal; all in the window if that suffices."""
    places, rule = scores.places, scores.rule
    if places is None:
        return None, (-1, -1, 0)
    sides = places.q, places.kv
    in_rows = all(side.sequence is None and side.valid is None and not side.moved for side in sides)
    if in_rows and scores.masked_out is None and isinstance(places.shift, int):
        return None, (*rule.window, places.shift)
    return hidden_pairs(places, rule, scores.masked_out), (-1, -1, 0)


def _rows_of_group(x: Tensor, group: int) -> Tensor:
    """Return (b, h, s, n) as (b, h / group, group * s, n): the rows of heads that share keys, in one matrix."""
    return x.unflatten(1, (-1, group)).flatten(2, 3)


def _softmax_in_order(logits: Tensor, scores: Scores) -> Tensor:
    """Return the weights of the batch-invariant mode; a sink is one more score, which is first."""
    sink = scores.sink
    if sink is not None:
        first = sink.float()[None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat((first, logits), -1)
    weights = softmax_batch_invariant(logits)
    weights = weights if sink is None else weights[..., 1:]
    return torch.nn.functional.dropout(weights, scores.dropout) if scores.dropout else weights


def _largest(scores: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Return the largest along dims; -inf if there is none, as with no query, for which PyTorch's amax raises."""
    if scores.numel():
        return scores.amax(dims, keepdim)
    return scores.sum(dims, keepdim).fill_(float("-inf"))


def _modified(logits: Tensor, scores: Scores) -> Tensor:
    if scores.score_mod is not None:
        logits = _by_score_mod(logits, scores)
    if scores.bias is not None:
        logits = logits + scores.bias.float()
    if scores.slopes is not None:
        assert scores.places is not None
        logits = logits + alibi_bias(scores.places, scores.slopes)
    return logits


def _by_score_mod(logits: Tensor, scores: Scores) -> Tensor:
    """Return the user's function, called once on all scores: its indices broadcast. FlexAttention calls it score by
    score.
    """
    b, h, s_q, s_kv = (torch.arange(size, device=logits.device) for size in logits.shape)
    b, h, q, kv = b[:, None, None, None], h[:, None, None], s_q[:, None], s_kv
    places = scores.places
    if places is not None and places.q.sequence is not None:
        b = places.q.sequence[:, None, :, None]
        q, kv = places.q.position[:, None, :, None], places.kv.position[:, None, None, :]
    assert scores.score_mod is not None
    return scores.score_mod(logits, b, h, q, kv, **scores.tensors)
