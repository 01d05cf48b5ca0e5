"""The router: which experts a token goes to and with which weight, and the loss that keeps experts equally busy.

Everything is plain PyTorch in fp32, which the compiler fuses; nothing is read back from the device.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import flags, is_one_of, not_among, numbers, positive, shape_of, shown, tensor, tensors, whole
from .._device import HIGH_PRECISION
from .._tracing import host_reads, is_eager
from ..formats import Members

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
EPSILON = 1e-20


class RoutingMapFormat(enum.IntEnum, metaclass=Members):
    """Formats of a routing map; the names in lower case mean the same."""

    BYTEMAP = 0
    BITMAP_U8 = 1


class QBHistogramMode(enum.IntEnum, metaclass=Members):
    """Transformer Engine's ways to count into ``qb_histogram``; here both count alike."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


# a table, for traced code of PyTorch 2.11 iterates over no class of an enum; a member equals its number
_MEMBERS: dict[type[enum.IntEnum], dict[str | int, enum.IntEnum]] = {
    kind: {key: member for member in kind for key in (member.name.lower(), member.value)}
    for kind in (RoutingMapFormat, QBHistogramMode)
}


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    routing_map_format: str | RoutingMapFormat = "bytemap",
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | QBHistogramMode | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose ``topk`` experts per token, and their weights.

    With "softmax" the weights are the softmax of the chosen logits, or, with ``use_pre_softmax``, the chosen values of
    the softmax of all. With "sigmoid" and "sqrtsoftplus" (``sqrt(softplus(x))``) they are the
    chosen scores divided by their sum, unless ``topk`` is 1.

    Args:
        logits: (*lead, E), fp32, bf16 or fp16; differentiable.
        topk: experts per token.
        use_pre_softmax: softmax before choosing; for "softmax" only, without effect on others.
        num_groups, group_topk: choose among the experts of the best ``group_topk`` of so many equal groups; a group is
            as good as the sum of its best ``topk // group_topk`` scores.
        scaling_factor: what the weights are multiplied by.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_bias: (E,), added to the scores for choosing only; for "sigmoid" and "sqrtsoftplus". No gradient.
        routing_map_format: "bytemap": bool (*lead, E); "bitmap_u8": uint8 (*lead, ceil(E / 8)), bit ``e % 8`` of byte
            ``e // 8`` for expert ``e``. A member of :class:`RoutingMapFormat` says the same.
        topk_indices: (*lead, topk), int16, int32 or int64; overwritten by the chosen experts, and returned instead of
            the map.
        qb_histogram: int32 (E, bins), to which one is added per token and expert: at the bias with which the expert's
            score would equal the best biased score not chosen. What lies beyond the bounds counts at the ends.
        qb_bin_bounds: fp32 (2,), the bins' start and end, the lower first; not checked on a GPU or in compiled code.
        qb_histogram_mode: "two_kernel", "fused_atomic" or a member of :class:`QBHistogramMode`; the result is the same.

    Returns:
        The weights (*lead, E) in the dtype of ``logits``, 0 for experts not chosen, and the routing map.

    Errors are raised before any kernel runs.

    Raises:
        TypeError: an argument of another type.
        ValueError: another dtype, score function or format; ``topk`` or groups that do not fit the experts; a bias with
            "softmax"; bounds that are reversed, equal or not finite; some but not all of the ``qb_`` arguments, or with
            anything but "sigmoid", a bias and no groups.
    """
    experts, packed = _check(logits, topk, score_function, routing_map_format)
    flags(use_pre_softmax=use_pre_softmax)
    _check_groups(experts, topk, num_groups, group_topk)
    _check_tensors(expert_bias, topk_indices, (*logits.shape[:-1], topk), experts, score_function)
    if scaling_factor is not None and not isinstance(scaling_factor, Tensor):
        numbers(scaling_factor=scaling_factor)
    elif scaling_factor is not None and scaling_factor.numel() != 1:
        raise ValueError(f"scaling_factor has shape {shape_of(scaling_factor)}; use a number")
    histogram = (qb_histogram, qb_bin_bounds, qb_histogram_mode)
    _check_histogram(histogram, experts, topk, score_function, expert_bias, num_groups)

    values = logits.float()
    if score_function != "softmax":
        scores = torch.sigmoid(values) if score_function == "sigmoid" else F.softplus(values).sqrt()
    else:
        scores = values.softmax(-1) if use_pre_softmax else values
    biased = scores.detach() if expert_bias is None else scores.detach() + expert_bias.detach().float()
    chosen = _choose(biased, topk, num_groups, group_topk)
    weights = _gather(scores, chosen)
    if score_function != "softmax":
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON) if topk > 1 else weights
    elif not use_pre_softmax:
        weights = weights.softmax(-1)
    if scaling_factor is not None:
        weights = weights * scaling_factor
    probs = _scatter(weights, chosen, experts).to(logits.dtype)
    if qb_histogram is not None:
        assert qb_bin_bounds is not None
        _count_margins(qb_histogram, qb_bin_bounds, scores.detach(), biased, topk)
    if topk_indices is not None:
        return probs, topk_indices.copy_(chosen)
    return probs, _routing_map(chosen, experts, packed)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | RoutingMapFormat = "bytemap"
) -> tuple[Tensor, Tensor]:
    """Return scores of all experts, for :func:`fused_moe_aux_loss`, and the map of the ``topk`` best.

    Args:
        logits: (*lead, E), fp32, bf16 or fp16; differentiable.
        topk: experts per token.
        score_function: "softmax", or "sigmoid" or "sqrtsoftplus", which are divided by their sum for every ``topk``.
        routing_map_format: as in :func:`fused_topk_with_score_function`.

    Returns:
        The routing map, and the scores, fp32 (*lead, E).

    Errors are raised before any kernel runs.

    Raises:
        TypeError: an argument of another type.
        ValueError: another dtype, score function or format, or a ``topk`` that does not fit the experts.
    """
    experts, packed = _check(logits, topk, score_function, routing_map_format)
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(-1)
    else:
        scores = torch.sigmoid(values) if score_function == "sigmoid" else F.softplus(values).sqrt()
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    chosen = scores.detach().topk(topk, dim=-1)[1]
    return _routing_map(chosen, experts, packed), scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Return the loss that is least when all experts get equally many tokens (Switch Transformer, equation 4).

    ``coeff * E / (topk * total ** 2) * sum_e(tokens_e * sum_t(probs[t, e]))``.

    Args:
        probs: (T, E), scores of all experts; differentiable. (T, S * E): of S sequences side by side, each with its own
            tokens per expert; the loss is the sum over the sequences.
        tokens_per_expert: (E,) or (S * E,), integers or floats; no gradient.
        total_num_tokens: tokens that both are counted over: an int, or a tensor of one element on the device.
        num_experts: E, also of several sequences.
        topk: experts per token.
        coeff: weight of the loss.

    Returns:
        A scalar in the dtype of ``probs``; the sums are in fp32.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: shapes that do not fit, or float64.
    """
    tensors(probs=probs, tokens_per_expert=tokens_per_expert)
    positive(num_experts=num_experts, topk=topk)
    numbers(coeff=coeff)
    if probs.dtype not in HIGH_PRECISION:
        raise ValueError(f"probs is {probs.dtype}; use float32, bfloat16 or float16")
    columns = probs.shape[-1] if probs.dim() == 2 else 0
    if not columns or columns % num_experts or tokens_per_expert.shape != (columns,):
        raise ValueError(
            f"probs has shape {shape_of(probs)} and tokens_per_expert {shape_of(tokens_per_expert)}; pass (T, E) "
            f"and (E,) of {num_experts} experts, or (T, S * E) and (S * E,) of S sequences side by side"
        )
    total = total_num_tokens
    if not isinstance(total, Tensor):
        numbers(total_num_tokens=total)
    elif total.numel() == 1:
        total = total.detach().reshape(()).float()
    else:
        raise ValueError(
            f"total_num_tokens has shape {shape_of(total)}; pass an int or a tensor of one element"
        )
    product = (probs.float().sum(0) * tokens_per_expert.detach().float()).sum()
    return (product * (num_experts * coeff / topk) / total / total).to(probs.dtype)


def _choose(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """Return the numbers of the best experts, of the best groups if there are groups."""
    if num_groups is not None and group_topk is not None:
        groups = scores.unflatten(-1, (num_groups, -1))
        best = groups.topk(topk // group_topk, dim=-1)[0].sum(-1).topk(group_topk, dim=-1)[1]
        closed = ~_mask(best, num_groups)
        scores = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(topk, dim=-1)[1]


# Compiled code compares with the number of each expert, all of which Inductor fuses, instead of reading and writing by
# index: Inductor (PyTorch 2.13) fuses what reads a scattered tensor with kernels that run before the scattering.


def _is_chosen(chosen: Tensor, experts: int) -> Tensor:
    return chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)


def _gather(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the scores (*lead, topk) of the chosen."""
    if is_eager():
        return scores.gather(-1, chosen)
    return torch.where(_is_chosen(chosen, scores.shape[-1]), scores.unsqueeze(-2), 0).sum(-1)


def _scatter(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Return the weights (*lead, E), zero where not chosen."""
    if is_eager():
        zeros = torch.zeros((*chosen.shape[:-1], experts), dtype=weights.dtype, device=weights.device)
        return zeros.scatter(-1, chosen, weights)
    return torch.where(_is_chosen(chosen, experts), weights.unsqueeze(-1), 0).sum(-2)


def _mask(chosen: Tensor, experts: int) -> Tensor:
    """Return which (*lead, E) are chosen."""
    if is_eager():
        zeros = torch.zeros((*chosen.shape[:-1], experts), dtype=torch.bool, device=chosen.device)
        return zeros.scatter(-1, chosen, True)
    return _is_chosen(chosen, experts).any(-2)


def _routing_map(chosen: Tensor, experts: int, packed: bool) -> Tensor:
    mask = _mask(chosen, experts)
    if not packed:
        return mask
    bits = F.pad(mask.to(torch.uint8), (0, -experts % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=chosen.device)).sum(-1, dtype=torch.uint8)


def _count_margins(histogram: Tensor, bounds: Tensor, scores: Tensor, biased: Tensor, topk: int) -> None:
    """One count per token and expert, in the bin of the bias that the expert would need."""
    experts, bins = histogram.shape
    needed = biased.topk(topk + 1, dim=-1)[0][..., -1:] - scores
    low, high = bounds.float().unbind()
    bin_ = ((needed - low) / (high - low) * bins).floor().clamp(0, bins - 1).long()
    index = (bin_ + bins * torch.arange(experts, device=bin_.device)).reshape(-1)
    counts = torch.zeros(experts * bins, dtype=histogram.dtype, device=bin_.device)
    histogram.add_(
        counts.scatter_add_(0, index, torch.ones_like(index, dtype=counts.dtype)).view(experts, bins)
    )


def _check(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | RoutingMapFormat
) -> tuple[int, bool]:
    """Return the number of experts and whether the map is packed into bits."""
    tensor("logits", logits)
    whole(topk=topk)
    if logits.dtype not in HIGH_PRECISION:
        raise ValueError(f"logits is {logits.dtype}; use float32, bfloat16 or float16")
    if not is_one_of(score_function, SCORE_FUNCTIONS):
        raise ValueError(f"score_function is {not_among(score_function, SCORE_FUNCTIONS)}")
    map_format = _member(RoutingMapFormat, "routing_map_format", routing_map_format)
    if logits.dim() < 2 or not 1 <= topk <= logits.shape[-1]:
        raise ValueError(
            f"topk is {topk} and logits has shape {shape_of(logits)}; pass (*lead, E) and choose 1 to E experts"
        )
    return logits.shape[-1], map_format is RoutingMapFormat.BITMAP_U8


def _member(kind: type[enum.IntEnum], name: str, value: Any) -> enum.IntEnum:
    """Return the member that is meant: given itself, by its name in lower case, or by its number.

    Raises:
        ValueError: none is.
    """
    member = _MEMBERS[kind].get(value) if isinstance(value, (str, int)) else None
    if member is not None:
        return member
    names = " or ".join(repr(member.name.lower()) for member in kind)
    raise ValueError(f"{name} is {shown(value)}; use {names}, or a member of {kind.__name__}")


def _check_groups(experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> None:
    if num_groups is None and group_topk is None:
        return
    if num_groups is None or group_topk is None:
        raise ValueError(
            f"num_groups is {shown(num_groups)} and group_topk {shown(group_topk)}; give both or neither"
        )
    whole(num_groups=num_groups, group_topk=group_topk)
    fits = num_groups >= 1 and experts % num_groups == 0 and 1 <= group_topk <= min(num_groups, topk)
    if not fits or topk > group_topk * (experts // num_groups):
        raise ValueError(
            f"num_groups={num_groups} and group_topk={group_topk} do not fit {experts} experts and topk={topk}: groups "
            "are of equal size, and those chosen hold topk experts, at least one each"
        )


def _check_tensors(
    expert_bias: Tensor | None,
    topk_indices: Tensor | None,
    shape: tuple[int, ...],
    experts: int,
    score_function: str,
) -> None:
    for label, given in (("expert_bias", expert_bias), ("topk_indices", topk_indices)):
        if given is not None:
            tensor(label, given)
    if expert_bias is not None and (score_function == "softmax" or expert_bias.shape != (experts,)):
        raise ValueError(
            f"expert_bias has shape {shape_of(expert_bias)} with score_function={shown(score_function)}; it is "
            f"({experts},), for 'sigmoid' and 'sqrtsoftplus'"
        )
    if topk_indices is not None and (
        topk_indices.shape != shape or topk_indices.dtype not in (torch.int16, torch.int32, torch.int64)
    ):
        raise ValueError(
            f"topk_indices is {topk_indices.dtype} of shape {shape_of(topk_indices)}; pass int16, int32 or int64 of "
            f"shape {shape}"
        )


def _check_histogram(
    given: tuple[Tensor | None, Tensor | None, str | QBHistogramMode | None],
    experts: int,
    topk: int,
    score_function: str,
    expert_bias: Tensor | None,
    num_groups: int | None,
) -> None:
    histogram, bounds, mode = given
    if histogram is None and bounds is None and mode is None:
        return
    if histogram is None or bounds is None or mode is None:
        raise ValueError("qb_histogram, qb_bin_bounds and qb_histogram_mode must be provided together")
    tensors(qb_histogram=histogram, qb_bin_bounds=bounds)
    if score_function != "sigmoid" or expert_bias is None or num_groups is not None or topk >= experts:
        raise ValueError(
            "qb_histogram only supports score_function='sigmoid' with expert_bias, no groups, and topk below the "
            f"number of experts; got {shown(score_function)}, topk={topk} of {experts}"
        )
    _member(QBHistogramMode, "qb_histogram_mode", mode)
    if histogram.dim() != 2 or histogram.shape[0] != experts or histogram.dtype != torch.int32:
        raise ValueError(
            f"qb_histogram is {histogram.dtype} {shape_of(histogram)}; pass int32 ({experts}, bins)"
        )
    if bounds.shape != (2,):
        raise ValueError(f"qb_bin_bounds has shape {shape_of(bounds)}; pass (2,), lower and upper")
    if host_reads(bounds):
        low, high = bounds.tolist()
        if not -math.inf < low < high < math.inf:  # a NaN compares false
            raise ValueError(
                f"qb_bin_bounds is [{low}, {high}]; pass two numbers that are finite with lower < upper"
            )
