"""Cross entropy by rows: one pass over the logits forward, one pass over logits and gradient backward.

Forward, a program walks along one row and keeps the maximum, the sum of exponentials below it and the sum of logits.
Backward is elementwise, so a gradient may take the place of its logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from .codecs import round_to_dtype, to_float32
from .launch import Launcher, check_device

STATISTICS_BLOCK = 8192
GRADIENT_BLOCK = 4096
LEAST_BLOCK = 512  # a pair of elements for each thread, as the widening takes them


@triton.jit
def _cross_entropy_statistics_kernel(x_ptr, target_ptr, out_ptr, T, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    index = tl.arange(0, BLOCK)
    highest = tl.full([], float("-inf"), tl.float32)
    exponentials = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + index < V
        x = to_float32(tl.load(x_row + start + index, mask=inside, other=0.0))
        total += tl.sum(x, 0)
        x = tl.where(inside, x, float("-inf"))
        new = tl.maximum(highest, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # so far nothing but -inf: exponentials of 0
        exponentials = exponentials * tl.exp(highest - base) + tl.sum(tl.exp(x - base), 0)
        # The maximum ignores NaN; a sum with it is NaN, and stays.
        highest = new
    base = tl.where(highest == float("-inf"), 0.0, highest)
    lane = tl.arange(0, 1)
    target = tl.load(target_ptr + row + lane).to(tl.int64)
    here = (target >= 0) & (target < V)
    at_target = tl.load(x_row + target, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, base + tl.log(exponentials))
    tl.store(out_ptr + T + row + lane, at_target)
    tl.store(out_ptr + 2 * T + row, total)


@triton.jit
def logit_gradient(x, is_target, lse, grad, on_target, everywhere):
    """Return the gradient of logits ``x``, fp32; a row whose gradient is 0 gets zeros."""
    share = tl.where(is_target, on_target, 0.0) + everywhere
    return tl.where(grad == 0.0, 0.0, grad * (tl.exp(x - lse) - share)).to(tl.float32)


@triton.jit
def _cross_entropy_gradient_kernel(
    x_ptr,
    target_ptr,
    lse_ptr,
    grad_ptr,
    dx_ptr,
    V,
    stride,
    dx_stride,
    chunks,
    on_target,
    everywhere,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    column = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    grad = tl.load(grad_ptr + row)
    lse = tl.load(lse_ptr + row)
    target = tl.load(target_ptr + row).to(tl.int64)
    x = to_float32(tl.load(x_ptr + row * stride + column, mask=inside, other=0.0))
    dx = logit_gradient(x, column == target, lse, grad, on_target, everywhere)
    tl.store(
        dx_ptr + row * dx_stride + column,
        round_to_dtype(dx, dx_ptr.dtype.element_ty),
        mask=inside,
    )


_statistics = Launcher(_cross_entropy_statistics_kernel, num_warps=8)
_gradient = Launcher(_cross_entropy_gradient_kernel, num_warps=8)


def _check(logits: Tensor, target: Tensor) -> None:
    check_device(logits)
    if logits.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"cross entropy takes logits in torch.float32, torch.bfloat16 or torch.float16, got {logits.dtype}"
        )
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross entropy takes logits (T, V) and a target (T,), got {tuple(logits.shape)} and {tuple(target.shape)}"
        )


def statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Compute ``reference.cross_entropy.statistics``, to fp32's accuracy."""
    _check(logits, target)
    T, V = logits.shape
    logits = _with_dense_rows(logits)
    out = torch.empty((3, T), dtype=torch.float32, device=logits.device)
    if T:
        block = min(STATISTICS_BLOCK, max(LEAST_BLOCK, triton.next_power_of_2(V)))
        _statistics((T, 1, 1), (logits, target.contiguous(), out, T, V, logits.stride(0)), (block,))
    return out


def gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    on_target: float,
    everywhere: float,
    in_place: bool = False,
) -> Tensor:
    """Return the gradient of the rows' losses; as ``reference.cross_entropy.gradient``, to the accuracy of the result's
    dtype.
    """
    _check(logits, target)
    T, V = logits.shape
    logits = _with_dense_rows(logits)
    dx = logits if in_place else torch.empty((T, V), dtype=logits.dtype, device=logits.device)
    if T and V:
        block = min(GRADIENT_BLOCK, max(LEAST_BLOCK, triton.next_power_of_2(V)))
        chunks = cdiv(V, block)
        tensors = (logits, target.contiguous(), lse.contiguous(), grad.contiguous(), dx)
        numbers = (V, logits.stride(0), dx.stride(0), chunks, on_target, everywhere)
        _gradient((T * chunks, 1, 1), (*tensors, *numbers), (block,))
    return dx


def _with_dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.shape[1] < 2 or logits.stride(1) == 1 else logits.contiguous()
