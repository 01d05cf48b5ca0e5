"""One step of Adam on fp32 tensors, in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CORRECTED = 1e9
"""A step count at which Adam's bias corrections are 1."""


class AdamTensors(NamedTuple):
    """fp32 tensors of one device, one of each for every parameter."""

    weights: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]


class AdamOptions(NamedTuple):
    """What a step takes besides; ``lr`` may be a tensor, ``decoupled`` is AdamW."""

    lr: Any
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


def fused(
    tensors: AdamTensors,
    count: Tensor,
    options: AdamOptions,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """By the operators behind ``torch.optim``.

    Args:
        count: of steps, this one included, fp32 of one element.
        scale: what gradients are divided by. found_inf: fp32; where it is not 0, nothing changes.
    """
    update: Any = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
    weights, grads, first, second = tensors
    update(
        weights,
        grads,
        first,
        second,
        [],
        [count] * len(weights),
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale is None else scale.to(count.device),
        found_inf=None if found_inf is None else found_inf.to(count.device),
    )


def spelled_out(tensors: AdamTensors, count: Tensor, options: AdamOptions) -> None:
    """What :func:`fused` computes, for the compiler, which has no shapes for those operators."""
    weights, grads, first, second = tensors
    lr, (beta1, beta2), eps, decay, decoupled = options
    if decay and decoupled:
        torch._foreach_mul_(weights, 1 - lr * decay)
    elif decay:
        grads = list(torch._foreach_add(grads, weights, alpha=decay))
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, (1 - beta2**count).sqrt())
    torch._foreach_add_(denominators, eps)
    changes = torch._foreach_div(first, denominators)
    torch._foreach_mul_(changes, lr / (1 - beta1**count))
    torch._foreach_sub_(weights, changes)
