"""Packed tokens by the flash kernel, here replaced by one that does as little for padding as the kernel does."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from test_attend import DIM, HEADS, assert_equal, cumulative, leaf
from torch import Tensor

import narrowcast as nc
from narrowcast.attention import core, varlen
from narrowcast.attention.masks import mask_rule


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_kv: Tensor,
    max_q: int,
    max_kv: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Outputs, and so gradients, are not numbers for tokens behind the last sequence."""
    lengths = [cu.diff().tolist() for cu in (cu_q, cu_kv)]
    assert max_q >= max(lengths[0]) and max_kv >= max(lengths[1])
    parts = [oracle.split(x, "thd", n) for x, n in ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))]
    outs = [
        oracle.one_sequence(*part, scale=scale, window=window_size, bottom_right=True)[0]
        for part in zip(*parts)
    ]
    out = oracle.join(outs, "thd", q, lengths[0]).unflatten(-1, (q.shape[1], -1))
    garbage = torch.where(torch.arange(len(q)) < cu_q[-1], 0.0, math.nan)[:, None, None]
    return out + garbage + 0.0 * sum((garbage * x[..., :1, :1]) for x in (q, k, v))


@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("longest", [(4, 4), (None, None)])
def test_padding_gets_zeros(mask: str, longest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    lengths = [3, 0, 4]
    q, k, v = leaf(9, HEADS, DIM), leaf(9, 2, DIM), leaf(9, 2, DIM)  # two tokens of padding
    cu = cumulative(lengths)
    out = varlen.attend(q, k, v, 0.3, mask_rule(mask), (cu, cu), longest)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    short = [x[:7] for x in (q, k, v)]
    expected = kernel(*short, cu, cu, 7, 7, scale=0.3, window_size=mask_rule(mask).window)
    theirs = torch.autograd.grad((expected * weight[:7]).sum(), (q, k, v))
    assert_equal([out[:7], *ours], [expected, *theirs])
    assert not out[7:].any() and not any(x[7:].any() for x in ours)


def test_the_module_hands_over_packed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    monkeypatch.setattr(core, "choose_backend", lambda facts, switches: "flash_varlen")
    q, k, v = (torch.randn(7, HEADS, DIM) for _ in range(3))
    cu_q, cu_kv = cumulative([3, 4]), cumulative([5, 2])
    module = nc.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type="padding")
    out = module(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    expected = kernel(q, k, v, cu_q, cu_kv, 7, 7, scale=DIM**-0.5, window_size=(-1, -1))
    assert torch.equal(out, expected.flatten(1))
