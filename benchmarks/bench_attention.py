"""Causal attention, forward and backward: PyTorch's kernels for groups of heads, and the one that our module chooses.

``share`` is the time over that of the module. Operations are those of the pairs that a causal mask leaves: 4 per pair,
head and channel in the forward, 10 in the backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, parser, rates, report, time_in_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import narrowcast as nc

HEADS, GROUPS = 32, 8
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SHAPES = [(8, 2048), (2, 8192), (1, 32768)]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_kernel(kernel: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def by_flex(length: int, device: str) -> Attention:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(  # type: ignore[return-value]
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True
        )

    return attend


def contenders(dim: int, length: int, chosen: argparse.Namespace) -> dict[str, Attention]:
    """Return what is compared; the first is the yardstick."""
    module = nc.DotProductAttention(HEADS, dim, GROUPS, qkv_format="bshd", attn_mask_type="causal")
    found: dict[str, Attention] = {"narrowcast": module, **{n: by_kernel(k) for n, k in KERNELS.items()}}
    if chosen.device == "cpu":
        return {name: run for name, run in found.items() if name in ("narrowcast", "flash")}
    if not chosen.skip_compile:
        found["flex"] = by_flex(length, chosen.device)
    return {name: run for name, run in found.items() if name == "narrowcast" or chosen.only in name}


def step_of(attend: Attention, forward_alone: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
        out = attend(q, k, v)
        if forward_alone:
            return out
        grad = grad if out.dim() == 3 else grad.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.autograd.grad(out, (q, k, v), grad)

    return step


def measure(batch: int, length: int, dim: int, chosen: argparse.Namespace) -> list[Row]:
    factory = {"device": chosen.device, "dtype": torch.bfloat16}

    def inputs() -> tuple[Tensor, ...]:
        q, k, v = (
            torch.randn(batch, length, heads, dim, **factory).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        )
        return q, k, v, torch.randn(batch, length, HEADS * dim, **factory)

    ring = [inputs(), inputs()]  # each is larger than the cache
    rows: list[Row] = []
    found = contenders(dim, length, chosen)
    for which, count in (("forward", 4), ("both", 14)):
        steps = {name: step_of(attend, which == "forward") for name, attend in found.items()}
        times = time_in_turns(steps, ring, chosen.repeats, device=chosen.device, launches=2)
        where: Row = {"batch": batch, "length": length, "head_dim": dim, "pass": which}
        rows += rates(where, times, count * batch * HEADS * dim * length * (length + 1) // 2)
    return rows


def main() -> None:
    chosen = parser(__doc__).parse_args()
    shapes = SHAPES if chosen.device == "cuda" else [(1, 64)]
    rows: list[Row] = []
    for dim in (64, 128):
        for batch, length in shapes[: chosen.shapes]:
            rows += measure(batch, length, dim, chosen)
            torch.compiler.reset()
    report("attention", rows, chosen)


if __name__ == "__main__":
    main()
