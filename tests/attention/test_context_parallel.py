"""Two ranks that share sequences against one that has them whole: outputs and all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import narrowcast as nc

WORLD, SECONDS = 2, 240
HEADS, GROUPS, DIM, TOKENS = 4, 2, 8, 12
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("bshd", {}, {}),
    "window": ("sbhd", {"window_size": (3, 0)}, {}),
    "all": ("sbhd", {"attn_mask_type": "no_mask", "softmax_type": "off-by-one"}, {}),
    "alibi": ("bshd", {"softmax_type": "learnable"}, {"core_attention_bias_type": "alibi"}),
    "again": ("bshd", {}, {"checkpoint_core_attention": True}),
    "compiled": ("bshd", {}, {}),
}
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def mine(x: Tensor, qkv_format: str, rank: int) -> Tensor:
    dim = qkv_format.index("s")
    chunks = x.chunk(2 * WORLD, dim)
    return torch.cat((chunks[rank], chunks[2 * WORLD - 1 - rank]), dim)


def outcome(rank: int, name: str) -> list[tuple[Tensor, Tensor]]:
    """What this rank has beside its part of the whole."""
    qkv_format, options, given = CASES[name]
    torch.manual_seed(3)
    lead = (2, TOKENS) if qkv_format == "bshd" else (TOKENS, 2)
    whole = [torch.randn(*lead, heads, DIM, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    module = nc.DotProductAttention(HEADS, DIM, GROUPS, qkv_format=qkv_format, **options).to("cpu")
    expected = module(*whole, **given)
    weight = torch.randn_like(expected)
    leaves = [*whole, *module.parameters()]
    grads = torch.autograd.grad((expected * weight).sum(), leaves)
    parts = [mine(x.detach(), qkv_format, rank).requires_grad_(True) for x in whole]
    module.set_context_parallel_group(dist.group.WORLD, cp_comm_type="all_gather")
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if name == "compiled" else module
    out = run(*parts, **given)
    loss = (out * mine(weight, qkv_format, rank)).sum()
    ours = list(torch.autograd.grad(loss, [*parts, *module.parameters()]))
    for grad in ours[3:]:  # of parameters: summed by whoever trains
        dist.all_reduce(grad)
    theirs = [mine(x.detach(), qkv_format, rank) for x in (expected, *grads[:3])]
    return [(a.detach(), b) for a, b in zip((out, *ours), (*theirs, *grads[3:]))]


def work(rank: int) -> Any:
    results = {name: outcome(rank, name) for name in CASES}
    odd = nc.DotProductAttention(2, 8, cp_group=dist.group.WORLD, cp_comm_type="all_gather")
    x = torch.randn(4, 1, 2, 8)
    with pytest.raises(ValueError, match="two equal chunks"):
        odd(x[:3], x[:3], x[:3])
    with pytest.raises(NotImplementedError, match="attn_mask_type='padding'"):
        odd(x, x, x, torch.zeros(1, 1, 1, 4, dtype=torch.bool), attn_mask_type="padding")
    return results


def test_ranks_share_sequences(tmp_path: Path) -> None:
    for results in run_ranks(work, tmp_path, WORLD, SECONDS):
        for name, pairs in results.items():
            for index, (ours, theirs) in enumerate(pairs):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=f"{name} {index}")
