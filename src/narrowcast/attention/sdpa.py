"""``torch.nn.functional.scaled_dot_product_attention``: flash, cuDNN, memory-efficient or math, as PyTorch chooses.

A mask that ``is_causal`` can say goes as that flag, and PyTorch may take its flash kernels; any other goes as one
tensor of all pairs, which cuDNN's and the memory-efficient kernels read. A query that sees no key gets zero, from every
kernel: its row of the mask is opened, and its output is then set to zero, which also makes its gradients zero.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .._tracing import while_tracing
from .masks import MaskRule, hidden_pairs
from .saved_codes import in_codes
from .scores import Scores

_attend_in_codes = in_codes(scaled_dot_product_attention)
_attend_in_traced_codes = in_codes(scaled_dot_product_attention, traced=True)


def _allow_in_graph(context: Any) -> None:
    torch.compiler.allow_in_graph(_attend_in_traced_codes)


def says_causal(rule: MaskRule, length_q: int, length_kv: int) -> bool:
    """Return whether PyTorch's flag, which counts from the top left, says all that the rule says."""
    if rule.window != (-1, 0) or rule.padding or rule.arbitrary:
        return False
    return not rule.bottom_right or length_q == length_kv


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    kernels: list[SDPBackend] | None,
    causal: bool,
    saves_codes: bool,
) -> Tensor:
    """Compute attention by one of PyTorch's kernels.

    Args:
        q: (b, h, s_q, d).
        k: (b, g, s_kv, d).
        v: (b, g, s_kv, d_v); g divides h.
        scores: without slopes, score_mod and sink.
        kernels: what PyTorch may choose from; None: from all.
        causal: PyTorch's flag says the rule (:func:`says_causal`). Otherwise ``scores.places`` does, or every query
            sees every key.
        saves_codes: keep int8 codes for the backward.

    Returns:
        (b, h, s_q, d_v).
    """
    mask = empty = None
    if scores.places is not None:
        hidden = hidden_pairs(scores.places, scores.rule, scores.masked_out)
        if hidden is not None:
            empty = hidden.all(-1, keepdim=True)
            mask = ~hidden | empty
    if scores.bias is not None:
        bias = scores.bias if mask is None else scores.bias.masked_fill(~mask, float("-inf"))
        mask = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    gqa = bool(q.shape[1] != k.shape[1])  # a tensor while torch.jit traces
    folds = gqa and not causal and q.shape[2] == 1 and (mask is None or mask.shape[1] == 1)
    if folds:  # a decoding step: the queries of a group are rows, so that no key or value is repeated
        q, gqa = q.squeeze(2).unflatten(1, (k.shape[1], -1)), False
    if gqa and mask is not None and q.is_cuda:  # no kernel of PyTorch takes a mask and groups of heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        gqa = False
    run = scaled_dot_product_attention
    if saves_codes:
        run = _attend_in_traced_codes if while_tracing(_allow_in_graph) else _attend_in_codes
    with contextlib.nullcontext() if kernels is None else sdpa_kernel(kernels):
        out = run(q, k, v, mask, scores.dropout, causal, scale=scores.scale, enable_gqa=gqa)
    if folds:
        out = out.flatten(1, 2)[:, :, None]
    return out if empty is None else out.masked_fill(empty, 0.0)
