"""What balances experts against loops over tokens, in eager and compiled code: biases, z-loss, capacities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.moe.balance import router_health

TOKENS, EXPERTS, TOPK, WIDTH = 37, 6, 2, 24


def draw(seed: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Weights and routing map of a router that prefers the first experts; some weights are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(tokens, EXPERTS, generator=generator)).round() / 4
    logits += torch.linspace(2, 0, EXPERTS)
    return nc.fused_topk_with_score_function(logits, TOPK, use_pre_softmax=True)


def kept(probs: Tensor, routing: Tensor, capacity: int, policy: str, size: int) -> list[list[bool]]:
    """The routing map after drops, copy by copy."""
    result = [[False] * EXPERTS for _ in range(len(probs))]
    for first in range(0, EXPERTS, size):
        members = range(first, first + size)
        copies = [(t, e) for t in range(len(probs)) for e in members if routing[t, e]]
        if policy == "probs":
            copies.sort(key=lambda copy: -float(probs[copy]))
        for t, e in copies[:capacity]:
            result[t][e] = True
    return result


@pytest.mark.parametrize(
    ("policy", "size", "compiled"),
    [("probs", 1, False), ("probs", 3, True), ("position", 1, False), ("position", 2, True)],
)
def test_copies_beyond_a_capacity_are_dropped(policy: str, size: int, compiled: bool) -> None:
    drop = nc.moe_drop_tokens
    if compiled:
        drop = torch.compile(drop, fullgraph=True, backend="aot_eager")
    probs, routing = draw()
    capacity = nc.moe_capacity(TOKENS, TOPK, EXPERTS, 1.0, size)
    assert capacity == math.ceil(TOKENS * TOPK / (EXPERTS // size))
    left, after = drop(probs, routing, capacity, policy, size)
    assert after.tolist() == kept(probs, routing, capacity, policy, size)
    assert (routing & ~after).any() and int(after.view(TOKENS, -1, size).sum((0, 2)).max()) == capacity
    assert torch.equal(left, probs * after)
    everything = drop(probs, routing, TOKENS * TOPK, policy, size)
    assert torch.equal(everything[1], routing)


def test_dropped_copies_get_no_gradient() -> None:
    probs, routing = draw()
    probs.requires_grad_(True)
    left, after = nc.moe_drop_tokens(probs, routing, 5)
    left.sum().backward()
    assert torch.equal(probs.grad, after.float())


def test_a_bias_moves_against_the_sign_of_the_error() -> None:
    bias, load = torch.tensor([0.5, 0.0, -0.5, 0.0]), torch.tensor([9, 5, 1, 5])
    nc.moe_update_expert_bias_(bias, load, 0.125)
    assert bias.tolist() == [0.375, 0.0, -0.375, 0.0]


def test_z_loss() -> None:
    logits = torch.randn(7, EXPERTS, requires_grad=True)
    loss = nc.moe_z_loss(logits, 0.5)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 7 / 2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    (grad,) = torch.autograd.grad(loss, logits)
    total = logits.detach().logsumexp(-1, keepdim=True)
    assert torch.allclose(grad, total * logits.detach().softmax(-1) / 7, atol=1e-6)
    assert nc.moe_z_loss(logits[:0], 1.0).detach() == 0
    assert torch.equal(nc.moe_z_loss(logits[0], 3.0), 3 * logits[0].logsumexp(-1).square())  # of one token


def test_health_of_a_forward() -> None:
    """Shares of the load by their definitions; without biases, dropped copies or logits these are not known."""
    logits = torch.randn(7, 3)
    kept = torch.tensor([[True, False, False], [False, True, True]])
    found = router_health(torch.tensor([3, 1, 0]), kept, torch.tensor([0.5, -1.0, 0.0]), logits)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    wanted = torch.tensor([entropy, 0.75 * 3, 0.25, -1.0, 0.5, float(nc.moe_z_loss(logits, 1.0))])
    assert torch.allclose(found, wanted, atol=1e-6)
    assert router_health(torch.tensor([3, 1, 0])).isnan().tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_fp32(autocast: bool) -> None:
    """Also of bf16 tensors, where bf16 rounds the product."""
    x, weight = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(EXPERTS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = nc.moe_router_logits(x, weight)
        rounded = torch.nn.functional.linear(x, weight.bfloat16())
    exact = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() < 1e-5
    assert (rounded - exact).abs().max() > 1e-3


def test_bad_arguments() -> None:
    probs, routing = draw()
    with pytest.raises(ValueError, match="policy is 'random'; use one of 'probs' or 'position'"):
        nc.moe_drop_tokens(probs, routing, 3, "random")
    with pytest.raises(ValueError, match="use a divisor of the 6 experts"):
        nc.moe_drop_tokens(probs, routing, 3, experts_per_group=4)
    with pytest.raises(ValueError, match="pass \\(T, E\\) and bool"):
        nc.moe_drop_tokens(probs, routing.int(), 3)
    with pytest.raises(ValueError, match="capacity_factor is -1"):
        nc.moe_capacity(4, 2, 4, -1.0)
    with pytest.raises(ValueError, match="use float32 \\(E,\\)"):
        nc.moe_update_expert_bias_(torch.zeros(3).bfloat16(), torch.ones(3), 0.1)
    for x, weight in (([1.0], torch.ones(2, 1)), (torch.ones(3, 1), [[1.0]])):
        with pytest.raises(TypeError, match="is .* of type list; give a tensor"):
            nc.moe_router_logits(x, weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass \\(\\*lead, K\\)"):
        nc.moe_router_logits(torch.ones(3, 4), torch.ones(2, 5))
