"""Balance of experts and stability of routers: biases without a loss, the z-loss, capacities, dropped copies.

Which of these a family of models trains with:

==============  ====================================================================================================
DeepSeek-V2     copies dropped per device beyond an even share, the lowest weights first (its report, 2.1.4)
DeepSeek-V3     the bias of each expert moves against the sign of its load's error (2.1.2); nothing is dropped
Qwen3           a balancing loss over the batch of all ranks (arXiv 2501.11873); nothing is dropped
Llama 4         ``sigmoid`` of the one chosen logit, applied to the expert's input; nothing is dropped
Switch, GShard  a capacity per expert, copies dropped in the order of the tokens (arXiv 2101.03961, equation 3)
ST-MoE          the z-loss (arXiv 2202.08906, equation 5)
==============  ====================================================================================================

Everything is fp32 and stays on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import in_range, is_one_of, not_among, numbers, positive, shape_of, tensors, whole
from .._device import HIGH_PRECISION
from ..functional import product

POLICIES = ("probs", "position")
HEALTH = ("load_entropy", "max_load", "dropped", "bias_min", "bias_max", "z")
"""What ``router_health`` returns, in its order."""


def moe_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the logits of a router: ``x @ weight.T + bias`` in fp32, also under ``torch.autocast``.

    A bf16 product picks other experts where two are close.

    Args:
        x: (*lead, K), fp32, bf16 or fp16; differentiable.
        weight: (E, K), differentiable. bias: (E,) or None.

    Returns:
        fp32 (*lead, E).

    Raises:
        TypeError: no tensors.
        ValueError: another dtype, or shapes that do not fit.
    """
    tensors(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(f"x is {x.dtype}; use float32, bfloat16 or float16")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {shape_of(x)} and weight {shape_of(weight)}; pass (*lead, K) and (E, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {shape_of(bias)}; pass ({weight.shape[0]},)")
    with torch.autocast(x.device.type, enabled=False):
        return product(x.float(), weight.float(), None if bias is None else bias.float())


def moe_z_loss(logits: Tensor, coeff: float) -> Tensor:
    """Return the loss that keeps logits small: ``coeff * mean_t(logsumexp_e(logits[t, e]) ** 2)``.

    Args:
        logits: (*lead, E), fp32, bf16 or fp16; differentiable.
        coeff: weight of the loss; ST-MoE uses 0.001.

    Returns:
        A scalar, fp32; 0 without tokens.

    Raises:
        TypeError: no tensor, or no number.
        ValueError: another dtype.
    """
    tensors(logits=logits)
    numbers(coeff=coeff)
    if logits.dtype not in HIGH_PRECISION or logits.dim() < 1:
        raise ValueError(
            f"logits is {logits.dtype} of shape {shape_of(logits)}; use (*lead, E) of float32, bfloat16 or float16"
        )
    squares = logits.float().logsumexp(-1).square()
    return coeff * squares.sum() / max(squares.numel(), 1)


@torch.no_grad()
def moe_update_expert_bias_(
    expert_bias: Tensor, tokens_per_expert: Tensor, rate: float, group: Any = None
) -> None:
    """Move each expert's bias against the sign of its load's error: ``bias += rate * sign(mean(load) - load)``.

    DeepSeek-V3's balancing without a loss (its report, 2.1.2; arXiv 2408.15664, algorithm 1). Call it once per step,
    with the counts of the whole batch.

    Args:
        expert_bias: fp32 (E,), changed in place.
        tokens_per_expert: (E,), integers or floats; how many tokens chose each expert.
        rate: DeepSeek-V3 uses 0.001.
        group: a process group whose counts are summed first; None: these are all.

    Raises:
        TypeError: no tensors, or no number.
        ValueError: shapes or a dtype that do not fit.
    """
    tensors(expert_bias=expert_bias, tokens_per_expert=tokens_per_expert)
    numbers(rate=rate)
    if expert_bias.dtype != torch.float32 or expert_bias.shape != tokens_per_expert.shape:
        raise ValueError(
            f"expert_bias is {expert_bias.dtype} {shape_of(expert_bias)} and tokens_per_expert has shape "
            f"{shape_of(tokens_per_expert)}; use float32 (E,) and (E,)"
        )
    load = tokens_per_expert.float()
    if group is not None:
        load = load.clone()
        dist.all_reduce(load, group=group)
    expert_bias.add_(torch.sign(load.mean() - load), alpha=rate)


def moe_capacity(
    tokens: int, topk: int, num_experts: int, capacity_factor: float, experts_per_group: int = 1
) -> int:
    """Return how many copies a group of experts takes: ``ceil(tokens * topk / groups * capacity_factor)``.

    Args:
        tokens: T, of one rank or of what is dropped together.
        topk: experts per token.
        num_experts: E.
        capacity_factor: 1.0 is an even share; Switch Transformer uses 1.0 to 1.25, DeepSeek-V2 1.0 per device.
        experts_per_group: experts that share a capacity: 1, or those of a device.

    Raises:
        TypeError: ``tokens`` is no whole number.
        ValueError: a size or factor that is not positive, or groups that do not divide the experts.
    """
    whole(tokens=tokens)
    positive(topk=topk, num_experts=num_experts, experts_per_group=experts_per_group)
    in_range("capacity_factor", capacity_factor, "use a positive number")
    if num_experts % experts_per_group:
        raise ValueError(
            f"experts_per_group is {experts_per_group}; use a divisor of the {num_experts} experts"
        )
    groups = num_experts // experts_per_group
    return math.ceil(tokens * topk * capacity_factor / groups)


def moe_drop_tokens(
    probs: Tensor, routing_map: Tensor, capacity: int, policy: str = "probs", experts_per_group: int = 1
) -> tuple[Tensor, Tensor]:
    """Keep at most ``capacity`` copies per group of experts; a dropped copy has no weight and no expert.

    The weights of the copies that remain do not change. A token without a copy is zero after ``moe_unpermute``, so that
    a residual connection passes it on.

    Args:
        probs: (T, E), 0 or more; differentiable.
        routing_map: bool (T, E).
        capacity: copies that a group takes, as :func:`moe_capacity` gives it.
        policy: "probs" keeps the largest weights, "position" the first tokens. Equal weights keep the first token.
        experts_per_group: experts that share a capacity: 1, or those of a device, as DeepSeek-V2 drops.

    Returns:
        The weights and the routing map without the dropped copies.

    Raises:
        TypeError: no tensors.
        ValueError: shapes that do not fit, another policy, or groups that do not divide the experts.
    """
    tensors(probs=probs, routing_map=routing_map)
    positive(capacity=capacity, experts_per_group=experts_per_group)
    if not is_one_of(policy, POLICIES):
        raise ValueError(f"policy is {not_among(policy, POLICIES)}")
    if probs.dim() != 2 or routing_map.shape != probs.shape or routing_map.dtype != torch.bool:
        raise ValueError(
            f"probs has shape {shape_of(probs)} and routing_map is {routing_map.dtype} "
            f"{shape_of(routing_map)}; pass (T, E) and bool (T, E)"
        )
    tokens, experts = probs.shape
    if experts % experts_per_group:
        raise ValueError(f"experts_per_group is {experts_per_group}; use a divisor of the {experts} experts")
    # (groups, copies of a group), the copies in the order of their tokens
    by_group = routing_map.view(tokens, -1, experts_per_group).transpose(0, 1).flatten(1)
    if policy == "position":
        kept = by_group & (by_group.cumsum(1) <= capacity)
    else:
        weights = probs.detach().view(tokens, -1, experts_per_group).transpose(0, 1).flatten(1)
        order = weights.masked_fill(~by_group, -1.0).argsort(dim=1, descending=True, stable=True)
        kept = by_group & (order.argsort(dim=1) < capacity)
    routing_map = kept.view(-1, tokens, experts_per_group).transpose(0, 1).reshape(tokens, experts)
    return probs * routing_map, routing_map


def router_health(
    assigned: Tensor, kept: Tensor | None = None, bias: Tensor | None = None, logits: Tensor | None = None
) -> Tensor:
    """Return the numbers of ``HEALTH`` of one forward, fp32 (6,); NaN for what is not given.

    Args:
        assigned: (E,), tokens that chose each expert.
        kept: bool (T, E), the routing map after copies were dropped.
        bias: fp32 (E,), the biases of the choice.
        logits: (T, E).
    """
    total = assigned.sum().float().clamp(min=1)
    share = assigned.float() / total
    experts = assigned.shape[0]
    unknown = share.new_full((), math.nan)
    numbers = [-torch.xlogy(share, share).sum() / math.log(max(experts, 2)), share.max() * experts]
    numbers.append(unknown if kept is None else 1 - kept.sum() / total)
    numbers += (unknown, unknown) if bias is None else (bias.min(), bias.max())
    numbers.append(unknown if logits is None else moe_z_loss(logits, 1.0))
    return torch.stack(numbers)
