"""The router against loops over tokens, its gradients, its formats, and the loss that balances experts."""

from __future__ import annotations

import math

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast.moe import QBHistogramMode, RoutingMapFormat
from narrowcast.testing import assert_close

TOKENS, EXPERTS, TOPK = 9, 12, 4


def draw(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))


def scored(row: list[float], score_function: str, pre: bool) -> list[float]:
    if score_function == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    if score_function == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(v))) for v in row]
    if not pre:
        return row
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def route(
    row: list[float], score_function: str, pre: bool, groups: int | None, bias: list[float]
) -> dict[int, float]:
    """Weight by expert, for one token."""
    scores = scored(row, score_function, pre)
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    allowed = list(range(EXPERTS))
    if groups is not None:  # two groups may be chosen, each as good as its two best
        size = EXPERTS // groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        worth = [sum(sorted((biased[e] for e in group), reverse=True)[: TOPK // 2]) for group in members]
        best = sorted(range(groups), key=lambda g: -worth[g])[:2]
        allowed = [e for g in best for e in members[g]]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:TOPK]
    if score_function == "softmax":
        if pre:
            return {e: scores[e] for e in chosen}
        total = sum(math.exp(scores[e]) for e in chosen)
        return {e: math.exp(scores[e]) / total for e in chosen}
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total for e in chosen}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("score_function", "pre", "biased"),
    [
        ("softmax", False, False),
        ("softmax", True, False),
        ("sigmoid", False, False),
        ("sigmoid", False, True),
        ("sqrtsoftplus", False, True),
    ],
)
def test_equals_loops(score_function: str, pre: bool, biased: bool, grouped: bool) -> None:
    logits = draw().requires_grad_(True)
    bias = torch.linspace(-0.5, 0.5, EXPERTS, requires_grad=True) if biased else None
    groups = 3 if grouped else None
    probs, mask = nc.fused_topk_with_score_function(
        logits, TOPK, pre, groups, 2 if grouped else None, 2.5, score_function, bias
    )
    expected = torch.zeros(TOKENS, EXPERTS)
    for token, row in enumerate(logits.tolist()):
        weights = route(row, score_function, pre, groups, [0.0] * EXPERTS if bias is None else bias.tolist())
        for expert, weight in weights.items():
            expected[token, expert] = 2.5 * weight
    assert mask.dtype == torch.bool and torch.equal(mask, expected > 0)
    assert_close(probs, expected, "fp32_sum_order")
    # gradient: of the same weights as a function of the logits, with the choice fixed
    other = logits.detach().clone().requires_grad_(True)
    if score_function == "softmax":
        weights = other.softmax(-1) * mask if pre else other.masked_fill(~mask, -math.inf).softmax(-1)
    else:
        scores = other.sigmoid() if score_function == "sigmoid" else (1 + other.exp()).log().sqrt()
        weights = scores * mask / (scores * mask).sum(-1, keepdim=True)
    grad = torch.randn(TOKENS, EXPERTS)
    (ours,) = torch.autograd.grad(probs, logits, grad)
    (theirs,) = torch.autograd.grad(2.5 * weights, other, grad)
    torch.testing.assert_close(ours, theirs)


def test_formats_of_the_map() -> None:
    logits = draw()
    probs, mask = nc.fused_topk_with_score_function(logits, TOPK)
    packed = nc.fused_topk_with_score_function(logits, TOPK, routing_map_format="bitmap_u8")[1]
    assert packed.dtype == torch.uint8 and packed.shape == (TOKENS, 2)
    bits = (packed.unsqueeze(-1) >> torch.arange(8)) & 1
    assert torch.equal(bits.flatten(1)[:, :EXPERTS].bool(), mask) and not bits.flatten(1)[:, EXPERTS:].any()
    for dtype in (torch.int16, torch.int32, torch.int64):
        place = torch.empty(TOKENS, TOPK, dtype=dtype)
        again, indices = nc.fused_topk_with_score_function(logits, TOPK, topk_indices=place)
        assert indices.data_ptr() == place.data_ptr()
        assert torch.equal(torch.zeros_like(mask).scatter(1, place.long(), True), mask)
        assert_bitwise(again, probs)


@pytest.mark.parametrize("member", [RoutingMapFormat.BITMAP_U8, 1, "bitmap_u8"])
def test_formats_by_member_number_and_name(member: str | RoutingMapFormat) -> None:
    packed = nc.fused_topk_with_score_function(draw(), TOPK, routing_map_format=member)[1]
    assert packed.dtype == torch.uint8 and packed.shape == (TOKENS, 2)
    again, _ = nc.fused_compute_score_for_moe_aux_loss(draw(), TOPK, "softmax", routing_map_format=member)
    assert_bitwise(again, packed)


def test_numbers_of_members_are_transformer_engine_s() -> None:
    assert {member.name: int(member) for member in RoutingMapFormat} == {"BYTEMAP": 0, "BITMAP_U8": 1}
    assert {member.name: int(member) for member in QBHistogramMode} == {"TWO_KERNEL": 0, "FUSED_ATOMIC": 1}


def test_low_precision_and_leading_dims() -> None:
    logits = draw().bfloat16()
    probs, mask = nc.fused_topk_with_score_function(
        logits.view(3, 3, EXPERTS), TOPK, score_function="sigmoid"
    )
    flat, flat_mask = nc.fused_topk_with_score_function(logits, TOPK, score_function="sigmoid")
    assert probs.dtype == torch.bfloat16 and torch.equal(probs.flatten(0, 1), flat)
    assert torch.equal(mask.flatten(0, 1), flat_mask)
    one, _ = nc.fused_topk_with_score_function(logits, 1, score_function="sigmoid")
    assert_bitwise(
        one.amax(1), logits.float().sigmoid().amax(1).bfloat16()
    )  # one weight is not divided by itself


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_weights_of_several_experts_add_up_to_one(topk: int) -> None:
    probs, mask = nc.fused_topk_with_score_function(draw(), topk, score_function="sigmoid")
    sums = torch.ones(TOKENS) if topk > 1 else draw().sigmoid().amax(1)
    torch.testing.assert_close(probs.sum(1), sums)
    assert (mask.sum(1) == topk).all()


def test_groups_that_hold_no_more_than_topk() -> None:
    mask = nc.fused_topk_with_score_function(draw(), 3, num_groups=4, group_topk=1)[1]
    members = mask.view(TOKENS, 4, 3).sum(2)
    assert (members.amax(1) == 3).all() and (members.sum(1) == 3).all()


@pytest.mark.parametrize(("low", "high"), [(-1.1, 1.1), (-0.1, 0.05)])  # inside of some of the biases
def test_histogram_of_the_bias_each_expert_needs(low: float, high: float) -> None:
    logits, bias = draw(), torch.linspace(-0.1, 0.1, EXPERTS)
    bins = 16
    histogram = torch.zeros(EXPERTS, bins, dtype=torch.int32)
    options = {"score_function": "sigmoid", "expert_bias": bias, "qb_bin_bounds": torch.tensor([low, high])}
    expected = torch.zeros_like(histogram)
    for seed in (0, 1):  # microbatches add up
        logits = draw(seed)
        nc.fused_topk_with_score_function(
            logits, TOPK, qb_histogram=histogram, qb_histogram_mode="two_kernel", **options
        )
        for row in logits.sigmoid():
            cutoff = sorted((row + bias).tolist())[-TOPK - 1]
            for expert, score in enumerate(row.tolist()):
                place = math.floor((cutoff - score - low) / (high - low) * bins)
                expected[expert, min(max(place, 0), bins - 1)] += 1
    assert torch.equal(histogram, expected) and histogram.sum() == 2 * TOKENS * EXPERTS
    for mode in QBHistogramMode:
        again = torch.zeros_like(histogram)
        for seed in (0, 1):
            nc.fused_topk_with_score_function(
                draw(seed), TOPK, qb_histogram=again, qb_histogram_mode=mode, **options
            )
        assert torch.equal(again, histogram)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("topk", [1, 2, EXPERTS])
def test_scores_for_the_loss_are_normalized_for_every_topk(topk: int, score_function: str) -> None:
    """As Transformer Engine's; the weights of :func:`fused_topk_with_score_function` are not, of one expert."""
    logits = draw()
    mask, scores = nc.fused_compute_score_for_moe_aux_loss(logits, topk, score_function)
    raw = torch.tensor([scored(row, score_function, True) for row in logits.tolist()])
    assert_close(scores, raw / raw.sum(1, keepdim=True), "fp32_sum_order")
    assert torch.equal(mask.sum(1), torch.full((TOKENS,), topk))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balancing_loss(score_function: str) -> None:
    logits = draw().requires_grad_(True)
    mask, scores = nc.fused_compute_score_for_moe_aux_loss(logits, TOPK, score_function)
    raw = torch.tensor([scored(row, score_function, True) for row in logits.tolist()])
    assert scores.dtype == torch.float32
    assert_close(scores, raw / raw.sum(1, keepdim=True), "fp32_sum_order")
    assert torch.equal(mask.sum(1), torch.full((TOKENS,), TOPK))
    tokens = mask.sum(0)
    loss = nc.fused_moe_aux_loss(scores, tokens, TOKENS, EXPERTS, TOPK, 0.01)
    expected = 0.01 * EXPERTS * (scores.sum(0) * tokens).sum() / (TOPK * TOKENS**2)
    assert_close(loss, expected, "fp32_sum_order")
    on_device = nc.fused_moe_aux_loss(scores, tokens, torch.tensor(TOKENS), EXPERTS, TOPK, 0.01)
    assert_close(on_device, loss, "fp32_sum_order")
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    scores, tokens = (
        torch.full((TOKENS, EXPERTS), 1 / EXPERTS),
        torch.full((EXPERTS,), TOKENS * TOPK / EXPERTS),
    )
    even = nc.fused_moe_aux_loss(scores, tokens, TOKENS, EXPERTS, TOPK, 1.0)
    assert_close(even, torch.tensor(1.0), "fp32_sum_order")


def test_balancing_loss_of_sequences_side_by_side() -> None:
    """(T, S * E): the loss is the sum of those of the S sequences."""
    scores = [draw(seed).softmax(-1).requires_grad_(True) for seed in range(3)]
    tokens = [torch.randint(1, 9, (EXPERTS,)) for _ in scores]
    apart = sum(
        nc.fused_moe_aux_loss(one, count, TOKENS, EXPERTS, TOPK, 0.01)
        for one, count in zip(scores, tokens, strict=True)
    )
    together = nc.fused_moe_aux_loss(torch.cat(scores, 1), torch.cat(tokens), TOKENS, EXPERTS, TOPK, 0.01)
    assert_close(together, apart, "fp32_sum_order")
    for ours, theirs in zip(
        torch.autograd.grad(together, scores), torch.autograd.grad(apart, scores), strict=True
    ):
        assert_close(ours, theirs, "fp32_sum_order")


def test_compiled() -> None:
    torch._dynamo.reset()

    def router(logits: Tensor, bias: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs, packed = nc.fused_topk_with_score_function(
            logits, TOPK, False, 3, 2, 2.0, "sigmoid", bias, routing_map_format="bitmap_u8"
        )
        mask, scores = nc.fused_compute_score_for_moe_aux_loss(logits, TOPK, "softmax")
        return probs, packed, nc.fused_moe_aux_loss(scores, mask.sum(0), total, EXPERTS, TOPK, 0.01)

    compiled, results = torch.compile(router, fullgraph=True, backend="aot_eager"), []
    for run in (router, compiled):
        logits = draw().requires_grad_(True)
        probs, packed, loss = run(logits, torch.linspace(-1, 1, EXPERTS), torch.tensor(TOKENS))
        results.append([probs, packed, loss, *torch.autograd.grad(probs.square().sum() + loss, logits)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(ours, theirs)


def test_bad_arguments() -> None:
    logits, bias = draw(), torch.zeros(EXPERTS)
    histogram = torch.zeros(EXPERTS, 4, dtype=torch.int32)
    top = nc.fused_topk_with_score_function
    attempts = {
        "torch.float64": lambda: top(logits.double(), 2),
        "score_function is 'relu'": lambda: top(logits, 2, score_function="relu"),
        "routing_map_format is 'bits'": lambda: top(logits, 2, routing_map_format="bits"),
        "routing_map_format is 7; use 'bytemap'": lambda: top(logits, 2, routing_map_format=7),
        "topk is 13": lambda: top(logits, 13),
        "num_groups=5": lambda: top(logits, 2, num_groups=5, group_topk=1),
        "give both": lambda: top(logits, 2, num_groups=3),
        "group_topk=3": lambda: top(logits, 2, num_groups=4, group_topk=3),
        "expert_bias": lambda: top(logits, 2, expert_bias=bias),
        "topk_indices": lambda: top(logits, 2, topk_indices=torch.zeros(TOKENS, 3, dtype=torch.int32)),
        "provided together": lambda: top(
            logits, 2, score_function="sigmoid", expert_bias=bias, qb_histogram=histogram
        ),
        "only supports score_function": lambda: top(
            logits, 2, qb_histogram=histogram, qb_bin_bounds=bias[:2], qb_histogram_mode="two_kernel"
        ),
        **{
            rf"qb_bin_bounds is \[{low}, {high}\]; .* finite with lower < upper": lambda low=low, high=high: (
                top(
                    logits,
                    2,
                    score_function="sigmoid",
                    expert_bias=bias,
                    qb_histogram=histogram,
                    qb_bin_bounds=torch.tensor([low, high]),
                    qb_histogram_mode="two_kernel",
                )
            )
            for low, high in ((1.0, -1.0), (1.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf))
        },
        "score_function is 'tanh'": lambda: nc.fused_compute_score_for_moe_aux_loss(logits, 2, "tanh"),
        "tokens_per_expert": lambda: nc.fused_moe_aux_loss(logits, bias[:3], 9, EXPERTS, 2, 0.1),
        r"probs has shape \(12,\)": lambda: nc.fused_moe_aux_loss(logits[0], bias[:1], 9, 1, 1, 0.1),
        "of 8 experts, or": lambda: nc.fused_moe_aux_loss(logits, bias, 9, 8, 2, 0.1),
        "probs is torch.float64": lambda: nc.fused_moe_aux_loss(logits.double(), bias, 9, EXPERTS, 2, 0.1),
    }
    for label, options in (
        ("expert_bias is", {"expert_bias": [0.0] * EXPERTS}),
        ("topk_indices is", {"topk_indices": [[0, 1]]}),
        ("use_pre_softmax is", {"use_pre_softmax": "no"}),
    ):
        with pytest.raises(TypeError, match=label):
            top(logits, 2, **options)  # type: ignore[arg-type]
    for message, attempt in attempts.items():
        with pytest.raises(ValueError, match=message):
            attempt()
