"""Statistics of quantization error, in one pass over a tensor and its decoded codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import product, to_float32
from .launch import Launcher, check_input

BLOCK = 2048
PROGRAMS = 1024


@triton.jit
def _observe_loss_kernel(x_ptr, read_ptr, ceiling_ptr, parts_ptr, n, beyond, BLOCK: tl.constexpr):
    programs = tl.num_programs(0)
    nonzero = tl.zeros([BLOCK], tl.int32)
    underflows = tl.zeros([BLOCK], tl.int32)
    saturations = tl.zeros([BLOCK], tl.int32)
    largest = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    errors = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(n, BLOCK * programs)):
        at = (tl.program_id(0).to(tl.int64) + turn * programs) * BLOCK + tl.arange(0, BLOCK)
        x = to_float32(tl.load(x_ptr + at, mask=at < n, other=0.0))
        read = tl.load(read_ptr + at, mask=at < n, other=0.0)
        ceiling = tl.load(ceiling_ptr + at, mask=at < n, other=0.0)
        size, error = tl.abs(x), x - read
        nonzero += (size != 0).to(tl.int32)
        underflows += ((size != 0) & (read == 0)).to(tl.int32)
        saturations += (size > tl.abs(ceiling) * beyond).to(tl.int32)
        largest = tl.maximum(largest, size)
        squares += product(x, x)
        errors += product(error, error)
    part = parts_ptr + tl.program_id(0)
    tl.store(part, tl.sum(nonzero).to(tl.float32))
    tl.store(part + programs, tl.max(largest))
    tl.store(part + 2 * programs, tl.sum(squares))
    tl.store(part + 3 * programs, tl.sum(errors))
    tl.store(part + 4 * programs, tl.sum(underflows).to(tl.float32))
    tl.store(part + 5 * programs, tl.sum(saturations).to(tl.float32))


_loss = Launcher(_observe_loss_kernel, num_warps=8)


def loss(x: Tensor, read: Tensor, ceiling: Tensor, beyond: float) -> Tensor:
    """Compute ``reference.observe.loss``, but for the order in which it adds.

    Raises:
        ValueError: a tensor the kernels cannot reach, or another dtype.
    """
    check_input(x, 1)
    x, read, ceiling = x.contiguous(), read.contiguous(), ceiling.contiguous()
    programs = min(cdiv(x.numel(), BLOCK), PROGRAMS)
    parts = torch.empty((6, programs), dtype=torch.float32, device=x.device)
    _loss((programs, 1, 1), (x, read, ceiling, parts, x.numel(), beyond), (BLOCK,))
    sums = parts.sum(1)
    sums[1] = torch.where(sums[2].isnan(), sums[2], parts[1].amax())  # maxima drop NaN, sums keep it
    return sums
