"""One call of attention: where its tokens stand, which backend computes it, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._determinism import DETERMINISM
from ..functional import decode_attention
from . import sdpa, unfused, varlen
from .backends import Facts, Switches, choose_backend, is_cudnn_safe, sdpa_kernels
from .context_parallel import ContextParallel, check_context_parallel, gathered, shared_places
from .formats import flattened, heads_first, sequence_length
from .masks import Geometry, MaskRule, Tokens, geometry, packed, padded_rows, rows
from .scores import Scores

MOST_HEADS = 64
"""Most heads of queries that may share a head of keys: the rows of a tile of ``functional.decode_attention``."""

Pair = tuple[Tensor | None, Tensor | None]


@dataclass
class Lengths:
    """The lengths of the sequences, each for queries and keys; None if not needed.

    Args:
        masks: (b, 1, 1, s) bools, True where there is no token.
        cu_seqlens: (b + 1) int32 sums of lengths.
        cu_seqlens_padded: (b + 1) int32, where each packed sequence begins.
        longest: upper bounds of the lengths.
        cached: the keys come from a KV cache. Queries are few, so a tensor of pairs is small and needs no preparation.
    """

    masks: Pair = (None, None)
    cu_seqlens: Pair = (None, None)
    cu_seqlens_padded: Pair = (None, None)
    longest: tuple[int | None, int | None] = (None, None)
    cached: bool = False


def places_of(
    sizes: tuple[int, int], qkv_format: str, rule: MaskRule, lengths: Lengths, device: torch.device
) -> Geometry:
    """Return where the tokens of a call stand; ``sizes`` are those of the tensors, of queries and keys."""
    sides: list[Tokens] = []
    for length, mask, cu, padded in zip(sizes, lengths.masks, lengths.cu_seqlens, lengths.cu_seqlens_padded):
        if qkv_format == "thd":
            assert cu is not None
            sides.append(packed(length, cu, padded))
        elif rule.padding:
            sides.append(padded_rows(length, mask, cu))
        else:
            sides.append(rows(length, device))
    return geometry(sides[0], sides[1], rule, *sizes)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qkv_format: str,
    scores: Scores,
    lengths: Lengths,
    switches: Switches,
    max_logit: bool = False,
    ranks: ContextParallel | None = None,
    saves_codes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention in a format.

    Args:
        q, k, v: in ``qkv_format``, checked.
        scores: without ``places``.
        switches: which kernels may be used.
        max_logit: return the largest logit of each head, too.
        ranks: which share the sequences; None for this one alone.
        saves_codes: a kernel of PyTorch keeps int8 codes for its backward.

    Returns:
        The output with heads and head dim in one, and the largest logits (h).

    Raises:
        ValueError: no backend can do it.
    """
    sizes = sequence_length(q, qkv_format), sequence_length(k, qkv_format)
    if ranks is not None:
        check_context_parallel(sizes[0], qkv_format, scores.rule, scores, lengths.cached, max_logit)
        k, v = gathered(k, qkv_format, ranks), gathered(v, qkv_format, ranks)
    thd, rule = qkv_format == "thd", scores.rule
    everything = not (thd or rule.padding or rule.arbitrary or scores.slopes is not None) and (
        not rule.bounded or (rule.window == (-1, 0) and rule.bottom_right and sizes[0] == 1 and ranks is None)
    )
    as_tensor = rule.arbitrary or lengths.cached
    flag = sdpa.says_causal(rule, *sizes) and not thd and scores.bias is None and ranks is None
    one_side = lengths.cu_seqlens[0] is lengths.cu_seqlens[1]
    facts = Facts(
        cuda=q.is_cuda,
        dtype=q.dtype,
        dims=(q.shape[-1], v.shape[-1]),
        packed=thd,
        gaps=lengths.cu_seqlens_padded[0] is not None,
        mask="none" if everything else "causal" if flag else "tensor" if as_tensor else "pairs",
        from_the_end=rule.bottom_right or not rule.bounded or one_side,
        bias=None if scores.bias is None else scores.bias.dtype,
        alibi=scores.slopes is not None,
        sink=scores.sink is not None,
        score_mod=scores.score_mod is not None,
        dropout=scores.dropout > 0,
        max_logit=max_logit,
        grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        score_grad=any(x.requires_grad for x in scores.tensors.values()),
        batch_invariant=bool(DETERMINISM.batch_invariant),
        lengths=sizes,
        decoding=lengths.cached and sizes[0] == 1 and q.shape[-2] <= MOST_HEADS * k.shape[-2],
    )
    backend = choose_backend(facts, switches)
    if backend == "flash_varlen":
        cu_q, cu_kv = lengths.cu_seqlens
        assert cu_q is not None and cu_kv is not None
        sums = cu_q, cu_kv
        out = varlen.attend(q, k, v, scores.scale, rule, sums, lengths.longest, saves_codes)
        return out.flatten(1), None
    if backend == "decode":
        cu_q, cu_kv = lengths.cu_seqlens
        assert cu_q is not None and cu_kv is not None
        sink = None if scores.sink is None else scores.sink.float()
        out = decode_attention(q[:, 0], k, v, cu_q, cu_kv, sink, scores.scale, rule.window[0])
        return out.flatten(1)[:, None], None
    if not everything and not (backend == "sdpa" and flag):
        if ranks is None:
            places = places_of(sizes, qkv_format, rule, lengths, q.device)
        else:
            places = shared_places(sizes, rule, ranks, q.device)
        scores = replace(scores, places=places)
    q, k, v = (heads_first(x, qkv_format) for x in (q, k, v))
    largest = None
    if backend == "flex":
        # PyTorch's module loads sympy, which takes a third of a second: not on ``import narrowcast``.
        from . import flex

        out, largest = flex.attend(q, k, v, scores, max_logit)
    elif backend == "sdpa":
        every = switches == Switches() and is_cudnn_safe(facts)
        kernels = None if every else sdpa_kernels(facts, switches)
        out = sdpa.attend(q, k, v, scores, kernels, flag and not everything, saves_codes)
    else:
        out, largest = unfused.attend(q, k, v, scores, max_logit)
    return flattened(out, qkv_format), largest.to(out.dtype) if max_logit and largest is not None else None
