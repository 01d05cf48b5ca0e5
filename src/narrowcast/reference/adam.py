"""A step of Adam on tensors of few bits: what is stored is widened to fp32, stepped there, and rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import log_codes
from .reduction import round_to_dtype

_CANONICAL_NAN = float("nan")


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    beside: Sequence[Tensor],
    ranges: Sequence[Tensor] = (),
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
    stochastic: bool = False,
) -> None:
    """Step weights and moments in place, one of each list per parameter.

    Args:
        weights, grads, first, second: of one shape per parameter and any strides; each fp32, bf16 or fp16. Moments may
            be uint8, the codes of ``log_codes.encode``.
        beside: empty, or per parameter what is written besides: the int16 rest of a bf16 weight, with which it is an
            fp32 value (``join``), or a copy of the weight in fp32, bf16 or fp16.
        ranges: empty, or per parameter the ranges of its moments in codes, fp32 (moments in codes, groups, 2).
        lr: of one element if a tensor.
        count: of steps, this one included, likewise.
        inv_scale: of one element; gradients are multiplied by it.
        found_inf: of one element; if it is not 0, nothing changes.
        decoupled: weights decay apart from the gradient (AdamW).
        stochastic: bf16 weights with nothing beside them are rounded by ``round_at_random``.

    Numerics:
        g, w, m and v are fp32, every operation rounds to nearest. With d1 = 1 - beta1 and d2 = 1 - beta2 rounded from
        double precision, and the corrections c(d) = 1 - (1 - d)**count of ``corrections``,
        m = beta1 m + d1 g and v = beta2 v + d2 (g g); w -= (m (1 / (sqrt(v) + eps r))) (lr r / c(d1)) + (lr decay) w,
        r = sqrt(c(d2)): the formula of torch.optim with one division and one rounding of w. Without bias correction
        r and c(d1) are 1. Without ``decoupled`` the last summand is missing, and g is g + decay w. Without decay
        neither is there. A NaN is that of ``canonical_nan``, in a weight with an int16 rest 0x7FC00000.
    """
    if found_inf is not None and bool(found_inf != 0):
        return
    shares = factors(lr, count, betas, eps, weight_decay, bias_correction, weights[0].device)
    for i, (weight, grad, m, v) in enumerate(zip(weights, grads, first, second, strict=True)):
        step_with(
            shares,
            weight,
            grad if inv_scale is None else grad.float() * inv_scale.float(),
            m,
            v,
            beside[i] if beside else None,
            ranges[i] if ranges else None,
            betas=betas,
            weight_decay=weight_decay,
            decoupled=decoupled,
            stochastic=int(count) if stochastic else None,
        )


def step_with(
    shares: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    beside: Tensor | None,
    ranges: Tensor | None,
    *,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool,
    stochastic: int | None = None,
) -> Tensor:
    """Step one parameter with given ``factors``; return it, a copy of the weight if there is one.

    Args:
        stochastic: the count of the step, where a bf16 weight is rounded at random.
    """
    (beta1, beta2), (rate, floor, shrink) = betas, shares
    rest = beside if beside is not None and beside.dtype == torch.int16 else None
    w = weight.float() if rest is None else join(weight, rest)
    g = grad.float()
    if weight_decay and not decoupled:
        g = g + w * weight_decay
    ranges_of_both = _ranges_of((m, v), ranges)
    old_m, old_v = (
        x.float() if own is None else log_codes.decode(x, own) for x, own in zip((m, v), ranges_of_both)
    )
    new_m = old_m * beta1 + g * (1 - beta1)
    new_v = old_v * beta2 + g * g * (1 - beta2)
    change = new_m * (torch.ones_like(g) / (_sqrt(new_v) + floor)) * rate
    if weight_decay and decoupled:
        change = change + w * shrink
    w = w - change
    for kept, values, own in zip((m, v), (new_m, new_v), ranges_of_both):
        if own is None:
            kept.copy_(round_to_dtype(values, kept.dtype))
        else:
            for stored, made in zip((kept, own), log_codes.encode(values)):
                stored.copy_(made)
    if rest is not None:
        for kept, half in zip((weight, rest), split(w)):
            kept.copy_(half)
        return weight
    if stochastic is not None and beside is None and weight.dtype == torch.bfloat16:
        return weight.copy_(round_at_random(w, stochastic))
    for kept in (weight,) if beside is None else (weight, beside):
        kept.copy_(round_to_dtype(w, kept.dtype))
    return weight if beside is None else beside


def source(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    beside: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool,
    out: list[Tensor] | None = None,
) -> Tensor:
    """Return a parameter after a step of Adam with the factors of ``factors``."""
    return step_with(
        factors,
        weight,
        grad,
        first,
        second,
        beside,
        None,
        betas=betas,
        weight_decay=weight_decay,
        decoupled=decoupled,
    )


def _ranges_of(moments: Sequence[Tensor], ranges: Tensor | None) -> list[Tensor | None]:
    """Return the ranges of each moment, None of one that is not in codes."""
    own = iter(() if ranges is None else ranges)
    return [next(own) if x.dtype == torch.uint8 else None for x in moments]


def factors(
    lr: float | Tensor,
    count: int | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors that all parameters of a step share, fp32 without dims: lr r / c(d1), eps r and lr decay."""
    rate = torch.as_tensor(lr, dtype=torch.float32, device=device).reshape(())
    shrink, floor = rate * weight_decay, torch.full((), eps, dtype=torch.float32, device=device)
    if bias_correction:
        root = _sqrt(correction(1 - betas[1], int(count))).to(device)
        rate, floor = rate * root / correction(1 - betas[0], int(count)).to(device), floor * root
    return rate, floor, shrink


def correction(missing: float, count: int) -> Tensor:
    """1 - (1 - missing)**count in fp32 without dims, by squaring: no difference of nearly equal numbers is taken.

    Numerics:
        Of two exponents, 1 - (1 - a) (1 - b) is a + b (1 - a); of twice one it is a (2 - a).
    """
    total, power = torch.zeros((), dtype=torch.float32), torch.tensor(missing, dtype=torch.float32)
    while count > 0:
        if count & 1:
            total = total + power * (1 - total)
        power = power * (2 - power)
        count >>= 1
    return total


def _sqrt(x: Tensor) -> Tensor:
    """Return rounded to nearest, which PyTorch's of fp32 is not everywhere."""
    return x.double().sqrt().float()


def round_at_random(values: Tensor, count: int) -> Tensor:
    """Round fp32 values to bf16, up or down, so that the mean over steps is the value.

    Args:
        values: of any shape.
        count: of the step.

    Numerics:
        A value's 16 lower bits are added to 16 bits of noise, of which only the carry is kept: the magnitude is rounded
        up as often as it is above the bf16 number below it. Noise is the upper half of Murmur3's mix of 32 bits: the
        value's, its place among the values, and the count times 0x9E3779B1, all joined by exclusive or.
    """
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    x = bits ^ torch.arange(values.numel(), device=values.device).view(values.shape)
    x = (x ^ (count * 0x9E3779B1)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    bits = torch.where(values.isnan(), 0x7FC00000, bits + (x >> 16))
    return (((bits >> 16) ^ 0x8000) - 0x8000).to(torch.int16).view(torch.bfloat16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values whose upper 16 bits, rounded, are bf16 ``high`` and whose others are int16 ``low``."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 values as (bf16, int16): rounded, ties away from zero, and what :func:`join` needs beside that."""
    # A GPU's NaN, all ones, would overflow.
    bits = torch.where(values.isnan(), _CANONICAL_NAN, values).view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)
