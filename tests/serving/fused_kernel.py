"""A product that quantizes its left operand itself, in groups of 1 x 128, as Triton kernels of engines do.

Divisions are Triton's, which round otherwise than IEEE's; a group of zeros is divided by 1e-12. Sums of 128 products
are scaled by the group's scale, then by the tile's, and added one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(x_ptr, weight_ptr, scale_ptr, out_ptr, M, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(K // BLOCK):
        at = block * BLOCK + inner
        x = tl.load(x_ptr + row[:, None] * K + at[None, :], mask=(row < M)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column[None, :] * K + at[:, None])
        scale = tl.max(tl.abs(x), axis=1) / 448.0  # type: ignore[operator]
        codes = (x / tl.maximum(scale, 1e-12)[:, None]).to(tl.float8e4nv)
        tile = tl.load(scale_ptr + tl.program_id(1) * (K // BLOCK) + block)
        total += tl.dot(codes, weight) * scale[:, None] * tile
    tl.store(out_ptr + row[:, None] * N + column[None, :], total.to(tl.bfloat16), mask=(row < M)[:, None])


def matmul(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in bf16; ``weight`` in E4M3, sizes of whole tiles, one scale per tile of 128 x 128."""
    (M, K), N = x.shape, weight.shape[0]
    out = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    launch: Any = _kernel[triton.cdiv(M, 128), N // 128]
    launch(x, weight, scale, out, M, N, K, ROWS=128, BLOCK=128, num_warps=8)
    return out
