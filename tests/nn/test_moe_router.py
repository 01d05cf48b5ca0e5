"""``MoERouter``: balanced by biases, losses, drops, and the health that a watch samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from convert.models import Experts
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.moe import HEALTH

TOKENS, EXPERTS, TOPK, WIDTH = 37, 6, 2, 24


def router(**options: Any) -> nc.MoERouter:
    torch.manual_seed(2)
    return nc.MoERouter(WIDTH, EXPERTS, TOPK, **options)


def test_biases_balance_a_router_that_prefers_an_expert() -> None:
    """Hundreds of updates without a gradient; the weights are not those of biased scores."""
    layer = router(score_function="sigmoid", bias_update_rate=0.005, device="cpu")
    x = torch.randn(256, WIDTH)
    with torch.no_grad():
        x += 2 * layer.weight[0]
        before = layer(x).routing_map.sum(0)
        layer.update_expert_bias()
        for _ in range(200):
            layer(x)
            layer.update_expert_bias()
    after = layer(x).routing_map.sum(0)
    fair = 256 * TOPK / EXPERTS
    assert before.max() > 1.7 * fair and after.max() < 1.15 * fair and after.min() > 0.85 * fair
    probs, chosen, _ = layer(x)
    scores = nc.moe_router_logits(x, layer.weight).sigmoid() * chosen
    assert torch.allclose(probs, scores / scores.sum(-1, keepdim=True))
    assert not layer.eval()(x).probs.requires_grad or layer.expert_bias.grad is None


def test_counts_are_of_training_forwards_until_an_update() -> None:
    layer = router(score_function="sqrtsoftplus", bias_update_rate=0.25)
    x = torch.randn(5, 3, WIDTH)
    first, second = layer(x).routing_map, layer(x).routing_map
    layer.eval()(x)
    assert torch.equal(layer.tokens_per_expert, (first.sum(0) + second.sum(0)).float())
    layer.update_expert_bias()
    assert not layer.tokens_per_expert.any() and set(layer.expert_bias.tolist()) <= {-0.25, 0.0, 0.25}
    assert set(layer.state_dict()) == {"weight", "expert_bias"}


def test_memory_that_is_not_initialized_gets_the_biases_of_before() -> None:
    layer = router(score_function="sigmoid", bias_update_rate=0.001, device="cpu")
    layer.expert_bias.fill_(0.5)
    assert (layer.to_empty(device="cpu").expert_bias == 0.5).all()
    assert (layer.to("meta").to_empty(device="cpu").expert_bias == 0.0).all()


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_counts_and_balances_in_fp32(cast: torch.dtype) -> None:
    layer = router(score_function="sigmoid", bias_update_rate=0.001, device="cpu")
    layer.expert_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    before = layer.expert_bias.clone()
    layer.to(cast)
    assert layer(torch.randn(301, WIDTH).bfloat16()).probs.dtype == torch.bfloat16
    layer.tokens_per_expert.add_(257)
    counted = layer.tokens_per_expert.clone()
    layer.update_expert_bias()
    assert layer.state_dict()["expert_bias"].dtype == torch.float32
    steps = torch.sign(counted.mean() - counted) * 0.001
    assert torch.equal(layer.expert_bias, before + steps)
    assert layer.to("meta").to(torch.bfloat16).expert_bias.dtype == torch.float32


def test_losses_of_a_router() -> None:
    layer = router(aux_loss_coeff=0.5, z_loss_coeff=0.25)
    x = torch.randn(TOKENS, WIDTH)
    probs, routing, loss = layer(x)
    logits = nc.moe_router_logits(x, layer.weight)
    _, scores = nc.fused_compute_score_for_moe_aux_loss(logits, TOPK, "softmax")
    expected = nc.fused_moe_aux_loss(scores, routing.sum(0), TOKENS, EXPERTS, TOPK, 0.5)
    assert torch.allclose(loss, expected + nc.moe_z_loss(logits, 0.25))
    assert torch.equal(probs, nc.fused_topk_with_score_function(logits, TOPK)[0])
    (probs.sum() + loss).backward()
    assert layer.weight.grad is not None and layer.weight.grad.any()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = router(
            score_function="sigmoid", bias_update_rate=0.125, capacity_factor=1.0, z_loss_coeff=0.01
        )
        self.dispatch = nc.distributed.MoEDispatch(EXPERTS, quantizer=None)
        self.experts = nc.GroupedLinear(EXPERTS, WIDTH, WIDTH, device="cpu", recipe="current")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs, routing, loss = self.router(x)
        return x + self.dispatch(x, probs, routing, len(x) * TOPK, self.experts), loss


def test_a_mixture_that_drops_is_watched_and_compiled() -> None:
    """Dropped copies are not sent; health is sampled in one graph and in eager code, and changes no number."""
    torch.manual_seed(4)
    x = torch.randn(TOKENS, WIDTH) + 1
    results: list[tuple[Tensor, list[float]]] = []
    for compiled in (False, True):
        model = Mixture()
        watch = nc.watch(model, every=2)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        y, loss = run(x)
        (y.square().mean() + loss).backward()
        assert watch.step()
        (record,) = watch.routers
        values = [getattr(record, name) for name in HEALTH]
        results.append((y.detach(), values))
        logits = nc.moe_router_logits(x, model.router.weight)
        chosen = nc.fused_topk_with_score_function(logits, TOPK, score_function="sigmoid")[1].sum(0)
        share = (chosen / chosen.sum()).double()
        assert record.step == 0 and record.router == "router"
        assert record.load_entropy == pytest.approx(
            float(-torch.xlogy(share, share).sum()) / math.log(EXPERTS), rel=1e-5
        )
        assert record.max_load == pytest.approx(float(share.max()) * EXPERTS, rel=1e-5)
        beyond = (chosen - nc.moe_capacity(TOKENS, TOPK, EXPERTS, 1.0)).clamp(min=0).sum()
        assert 0 < record.dropped == pytest.approx(float(beyond / chosen.sum()), rel=1e-5)
        assert record.z == pytest.approx(float(logits.detach().logsumexp(-1).square().mean()), rel=1e-5)
        assert (record.bias_min, record.bias_max) == (0.0, 0.0) and "load_entropy" in str(watch)
        watch.close()
        assert set(model.state_dict()) == set(Mixture().state_dict())
        assert torch.equal(y, model(x)[0])
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == pytest.approx(results[1][1])


def test_a_token_without_a_copy_is_passed_on() -> None:
    model = Mixture()
    x = torch.randn(1, WIDTH).expand(TOKENS, -1).contiguous()  # all want the same experts
    y, _ = model(x)
    routing = model.router(x).routing_map
    capacity = nc.moe_capacity(TOKENS, TOPK, EXPERTS, 1.0)
    assert routing.sum(0).max() == capacity
    assert torch.equal(y[capacity:], x[capacity:]) and not torch.equal(y[:capacity], x[:capacity])


def test_the_load_of_converted_experts_is_watched() -> None:
    model = nn.Sequential(nc.convert(Experts(), "current"))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 3]])
    with nc.watch(model) as watch:
        model[0](torch.randn(3, 32), chosen, torch.rand(3, 2)).sum().backward()
        watch.step()
    (record,) = watch.routers
    assert (record.router, record.max_load) == ("0", 2.0) and math.isnan(record.dropped)
    entropy = -(math.log(1 / 2) / 2 + 3 * math.log(1 / 6) / 6) / math.log(4)
    assert record.load_entropy == pytest.approx(entropy, rel=1e-5)
    assert not dict(model.named_buffers()).keys() & {"0._watched_health"}


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="with score_function='softmax'; use 'sigmoid'"):
        router(bias_update_rate=0.1)
    with pytest.raises(RuntimeError, match="give it a bias_update_rate"):
        router().update_expert_bias()
    with pytest.raises(ValueError, match="topk is 7; use 1 to the 6"):
        nc.MoERouter(WIDTH, EXPERTS, 7)
