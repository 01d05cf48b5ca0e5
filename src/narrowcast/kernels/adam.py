"""A step of Adam: one pass over weights, gradients and moments, whatever each is stored in.

It is bound by memory: 14 bytes of an element where all is bf16, 28 in fp32. What depends on the rate and the step
count alone, one program computes beforehand, so that neither has to be known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import product, reciprocal, round_to_dtype, to_float32
from .launch import INTERPRETING, Launcher, check_device

BLOCK = 1024
_NOTHING, _COPY, _REST = 0, 1, 2
_NO_DECAY, _OF_GRADIENTS, _OF_WEIGHTS = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 2**31 - 2**16  # elements that 32 bits count, a block more included


@triton.jit
def _correction(missing, count, EMULATE: tl.constexpr):
    """``reference.adam.correction``, (1,)."""
    power = tl.full((1,), 0.0, tl.float32) + missing
    total = tl.full((1,), 0.0, tl.float32)
    while count > 0:
        total = tl.where(count % 2 == 1, total + product(power, 1.0 - total, EMULATE), total)
        power = product(power, 2.0 - power, EMULATE)
        count = count // 2
    return total


@triton.jit
def _factors_kernel(
    factors_ptr,
    lr,
    count,
    missing1,
    missing2,
    eps,
    decay,
    STORED_LR: tl.constexpr,
    STORED_COUNT: tl.constexpr,
    CORRECTED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    if STORED_LR:
        lr = tl.load(lr).to(tl.float32)
    rate = tl.full((1,), 0.0, tl.float32) + lr
    floor = tl.full((1,), 0.0, tl.float32) + eps
    here = factors_ptr + tl.arange(0, 1)
    tl.store(here + 2, rate * decay)
    if CORRECTED:
        if STORED_COUNT:
            count = tl.load(count).to(tl.int32)
        count = tl.full((), 0, tl.int32) + count  # else 1 would be a constant
        root = tl.sqrt_rn(_correction(missing2, count, EMULATE))
        rate = tl.div_rn(rate * root, _correction(missing1, count, EMULATE))
        floor = floor * root
    tl.store(here, rate)
    tl.store(here + 1, floor)


@triton.jit
def _step_kernel(
    weight_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    beside_ptr,
    factors_ptr,
    inv_scale_ptr,
    found_inf_ptr,
    beta1,
    missing1,
    beta2,
    missing2,
    decay,
    n,
    BESIDE: tl.constexpr,
    DECAY: tl.constexpr,
    SCALED: tl.constexpr,
    STOPPABLE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    if STOPPABLE:
        if tl.load(found_inf_ptr) != 0:
            return
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    g = to_float32(tl.load(grad_ptr + at, mask=inside, other=0.0), EMULATE)
    m = to_float32(tl.load(first_ptr + at, mask=inside, other=0.0), EMULATE)
    v = to_float32(tl.load(second_ptr + at, mask=inside, other=0.0), EMULATE)
    if BESIDE == 2:
        rest = tl.load(beside_ptr + at, mask=inside, other=0).to(tl.int32)
        high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        w = (high + rest).to(tl.float32, bitcast=True)
    else:
        w = to_float32(weight, EMULATE)

    if SCALED:
        g = product(g, tl.load(inv_scale_ptr).to(tl.float32), EMULATE)
    if DECAY == 1:
        g = g + product(w, decay, EMULATE)
    m = product(m, beta1, EMULATE) + product(g, missing1, EMULATE)
    v = product(v, beta2, EMULATE) + product(g * g, missing2, EMULATE)
    # Of a gradient of zeros, a division would take its slow path; a reciprocal does not.
    inverse = reciprocal(tl.sqrt_rn(v) + tl.load(factors_ptr + 1), EMULATE)
    change = product(m * inverse, tl.load(factors_ptr), EMULATE)
    if DECAY == 2:
        change = change + product(w, tl.load(factors_ptr + 2), EMULATE)
    w = w - change

    tl.store(first_ptr + at, round_to_dtype(m, first_ptr.dtype.element_ty, EMULATE), mask=inside)
    tl.store(second_ptr + at, round_to_dtype(v, second_ptr.dtype.element_ty, EMULATE), mask=inside)
    if BESIDE == 2:
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        rounded = high.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_ptr + at, rounded, mask=inside)
        tl.store(beside_ptr + at, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weight_ptr + at, round_to_dtype(w, weight_ptr.dtype.element_ty, EMULATE), mask=inside)
    if BESIDE == 1:
        tl.store(beside_ptr + at, round_to_dtype(w, beside_ptr.dtype.element_ty, EMULATE), mask=inside)


_factors = Launcher(_factors_kernel, num_warps=1)
_step = Launcher(_step_kernel, num_warps=4)


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    beside: Sequence[Tensor],
    *,
    lr: float | Tensor,
    count: int | Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """``reference.adam.step``, equal to the byte, a launch per parameter.

    Raises:
        ValueError: ``check_device`` refuses, or a tensor is of another dtype.
    """
    check_device(weights[0])
    missing1, missing2 = 1 - betas[0], 1 - betas[1]
    factors = torch.empty(3, dtype=torch.float32, device=weights[0].device)
    stored = isinstance(lr, Tensor), isinstance(count, Tensor)
    _factors(
        (1, 1, 1),
        (factors, lr, count, missing1, missing2, eps, weight_decay),
        (*stored, bias_correction, INTERPRETING),
    )
    decay = _NO_DECAY if not weight_decay else _OF_WEIGHTS if decoupled else _OF_GRADIENTS
    shared = (
        factors,
        factors if inv_scale is None else inv_scale,
        factors if found_inf is None else found_inf,
    )
    numbers = (betas[0], missing1, betas[1], missing2, weight_decay)
    flags = (decay, inv_scale is not None, found_inf is not None)
    for i, (weight, grad, m, v) in enumerate(zip(weights, grads, first, second, strict=True)):
        n = weight.numel()
        kept = (weight, m, v, *beside[i : i + 1])
        w, m, v, *other = dense = [x if x.is_contiguous() else x.contiguous() for x in kept]
        kind = _NOTHING if not other else _REST if other[0].dtype == torch.int16 else _COPY
        _check_dtypes((grad, *(dense[:3] if kind == _REST else dense)))
        if n:
            _step(
                (cdiv(n, BLOCK), 1, 1),
                (w, grad.contiguous(), m, v, other[0] if other else factors, *shared, *numbers, n),
                (kind, *flags, n >= _FEW, BLOCK, INTERPRETING),
            )
        for x, written in zip(kept, dense):
            if x is not written:
                x.copy_(written)


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.dtype not in _DTYPES:
            raise ValueError(f"cannot step {x.dtype}; use torch.float32, torch.bfloat16 or torch.float16")
