"""The scale order of a block-scaled tensor-core GEMM: a permutation of 32-bit words, four scales of a row each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, cdiv
from .launch import Launcher, check_device, is_aligned

BLOCK = 1024


@triton.jit
def _swizzle_permute_kernel(source_ptr, out_ptr, n, tiles, INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    # A tile of 128 rows is one word wide; ``tiles`` of them lie side by side.
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < n
    tile = word // 128
    row = tile // tiles * 128 + (word % 4) * 32 + (word % 128) // 4
    compact = row * tiles + tile % tiles
    if INVERSE:
        tl.store(out_ptr + compact, tl.load(source_ptr + word, mask=inside), mask=inside)
    else:
        tl.store(out_ptr + word, tl.load(source_ptr + compact, mask=inside), mask=inside)


_permute = Launcher(_swizzle_permute_kernel, num_warps=4)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Compute ``reference.swizzle.swizzle_scales`` of fewer than 2**31 elements."""
    return _run(scales, inverse=False)


def unswizzle_scales(scales: Tensor) -> Tensor:
    """Compute ``reference.swizzle.unswizzle_scales`` of fewer than 2**31 elements."""
    return _run(scales, inverse=True)


def _run(scales: Tensor, inverse: bool) -> Tensor:
    check_device(scales)
    if scales.dtype != torch.uint8:
        raise ValueError(f"cannot swizzle scales of {scales.dtype}; view them as torch.uint8")
    if scales.dim() != 2 or scales.shape[0] % SCALE_TILE_ROWS or scales.shape[1] % SCALE_TILE_COLUMNS:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} cannot be swizzled; "
            f"pad them to a multiple of {SCALE_TILE_ROWS} rows and {SCALE_TILE_COLUMNS} columns"
        )
    out = torch.empty(scales.shape, dtype=torch.uint8, device=scales.device)
    n, tiles = scales.numel() // SCALE_TILE_COLUMNS, scales.shape[1] // SCALE_TILE_COLUMNS
    if n == 0:
        return out
    scales = scales.contiguous()
    if not is_aligned(scales, 4):
        scales = scales.clone()
    _permute(
        (cdiv(n, BLOCK), 1, 1), (scales.view(torch.int32), out.view(torch.int32), n, tiles), (inverse, BLOCK)
    )
    return out
