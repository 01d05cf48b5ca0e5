"""Attention as its definition says it: one sequence and one head at a time, in fp32, every pair of tokens by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sees(
    i: int, j: int, n_q: int, n_kv: int, causal: bool, window: tuple[int, int], bottom_right: bool
) -> bool:
    """Whether query i of n_q sees key j of n_kv."""
    diagonal = i + (n_kv - n_q if bottom_right else 0)
    if causal and j > diagonal:
        return False
    left, right = window
    return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)


def one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    masked_out: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(h, n_q, d_v) and the largest score of each head, of q (h, n_q, d), k (g, n_kv, d), v (g, n_kv, d_v).

    masked_out (h, n_q, n_kv), bias (h, n_q, n_kv), slopes (h), sink (h).
    """
    heads, n_q, n_kv = q.shape[0], q.shape[1], k.shape[1]
    outs, largest = [], []
    for h in range(heads):
        group = h // (heads // k.shape[0])
        scores = scale * q[h].float() @ k[group].float().T
        if score_mod is not None:
            scores = score_mod(scores, h, torch.arange(n_q)[:, None], torch.arange(n_kv)[None])
        if bias is not None:
            scores = scores + bias[h].float()
        visible = torch.tensor(
            [[sees(i, j, n_q, n_kv, causal, window, bottom_right) for j in range(n_kv)] for i in range(n_q)],
            dtype=torch.bool,
        ).reshape(n_q, n_kv)
        if slopes is not None:
            shift = n_kv - n_q if bottom_right else 0
            far = (torch.arange(n_kv)[None] - torch.arange(n_q)[:, None] - shift).abs()
            scores = scores - slopes[h] * far
        if masked_out is not None:
            visible = visible & ~masked_out[h]
        rows = []
        for i in range(n_q):
            keys = visible[i].nonzero()[:, 0]
            if not len(keys):
                rows.append(0.0 * q[h, i].float().sum() + torch.zeros(v.shape[-1]))
                continue
            logits = scores[i, keys]
            if sink is not None:
                logits = torch.cat((logits, sink[h : h + 1].float()))
            rows.append(torch.softmax(logits, 0)[: len(keys)] @ v[group, keys].float())
        outs.append(torch.stack(rows) if rows else q.new_zeros(0, v.shape[-1]).float())
        seen = scores[visible]
        largest.append(seen.max() if seen.numel() else torch.tensor(-math.inf))
    return torch.stack(outs), torch.stack(largest).detach()


def split(x: Tensor, qkv_format: str, lengths: list[int], begins: list[int] | None = None) -> list[Tensor]:
    """The sequences (h, n, d) of a tensor in a format."""
    if qkv_format == "thd":
        begins = [sum(lengths[:i]) for i in range(len(lengths))] if begins is None else begins
        return [x[begin : begin + n].transpose(0, 1) for begin, n in zip(begins, lengths)]
    rows = x.unbind(1) if qkv_format == "sbhd" else x.unbind(0)
    return [row[:n].transpose(0, 1) for row, n in zip(rows, lengths)]


def join(
    outs: list[Tensor], qkv_format: str, like: Tensor, lengths: list[int], begins: list[int] | None = None
) -> Tensor:
    """Outputs (h, n, d_v) of all sequences in a format, heads and dims in one; zero where there is no token."""
    flat = [out.transpose(0, 1).flatten(1) for out in outs]
    width = flat[0].shape[1]
    if qkv_format == "thd":
        begins = [sum(lengths[:i]) for i in range(len(lengths))] if begins is None else begins
        whole = torch.zeros(like.shape[0], width)
        for begin, out in zip(begins, flat):
            whole = torch.cat((whole[:begin], out, whole[begin + len(out) :]))
        return whole
    size = like.shape[0] if qkv_format == "sbhd" else like.shape[1]
    padded = [torch.cat((out, torch.zeros(size - len(out), width))) for out in flat]
    return torch.stack(padded, 1 if qkv_format == "sbhd" else 0)
