"""Experts of Llama 4 and JetMoE run as grouped layers; weights of layers that nobody calls are not converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import operands

from .models import Experts, JetMoeParallelExperts, Llama4TextExperts, MambaMixer, route

CURRENT = nc.recipe.Float8CurrentScaling()
RECIPES = [CURRENT, nc.recipe.DelayedScaling(), nc.recipe.MXFP8BlockScaling()]


def layers_of(weight: Tensor, recipe: Any) -> nn.ModuleList:
    """A converted ``nn.Linear`` for each expert; ``weight``: (E, N, K)."""
    layers = nn.ModuleList(nn.Linear(one.shape[1], one.shape[0], bias=False) for one in weight)
    for layer, one in zip(layers, weight):
        layer.weight.data.copy_(one)
    return nc.convert(layers, recipe, small=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: type(one).__name__)
def test_experts_of_llama_4_are_grouped_layers(recipe: Any) -> None:
    torch.manual_seed(0)
    plain = Llama4TextExperts()
    experts = nc.convert(copy.deepcopy(plain), recipe)
    first, second = (layers_of(one.detach().transpose(1, 2), recipe) for one in plain.parameters())
    x = torch.randn(4 * 7, 32)
    outputs = []
    for rows, up_layer, down_layer in zip(x.chunk(4), first, second):
        gate, up = up_layer(rows).chunk(2, dim=-1)
        outputs.append(down_layer(up * nn.functional.silu(gate)))
    expected, ours = torch.cat(outputs), experts(x)
    assert torch.allclose(ours, expected, atol=1e-5)
    assert not torch.allclose(ours, plain(x), atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    for name, layers in (("gate_up_proj", first), ("down_proj", second)):
        grad = torch.stack([layer.weight.grad for layer in layers]).transpose(1, 2)
        assert torch.allclose(getattr(experts, name).grad, grad, atol=1e-4), name
    assert torch.equal(nc.revert(experts)(x), plain(x))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: type(one).__name__)
def test_experts_of_jetmoe_are_a_grouped_layer(recipe: Any) -> None:
    torch.manual_seed(0)
    plain = JetMoeParallelExperts()
    experts = nc.convert(copy.deepcopy(plain), recipe)
    layers = layers_of(plain.weight.detach(), recipe)
    x, sizes = torch.randn(20, 32), [7, 1, 0, 12]
    expected = torch.cat([layer(rows) for layer, rows in zip(layers, x.split(sizes))])
    ours = experts(x, sizes)
    assert torch.allclose(ours, expected, atol=1e-5)
    ours.square().sum().backward()
    expected.square().sum().backward()
    grads = [torch.zeros_like(one.weight) if one.weight.grad is None else one.weight.grad for one in layers]
    assert torch.allclose(experts.weight.grad, torch.stack(grads), atol=1e-4)
    assert torch.equal(nc.revert(experts)(x, sizes), plain(x, sizes))


def test_their_receipt_counts_what_a_token_meets() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Module(), JetMoeParallelExperts()
            self.router.top_k = 2

    receipt = nc.receipt(nc.convert(nn.ModuleList([Mixture(), Llama4TextExperts()]), CURRENT))
    assert [one.decision for one in receipt.gemms] == ["converted"] * 3
    assert [one.name for one in receipt.gemms] == ["0.experts", "1.gate_up_proj", "1.down_proj"]
    chosen, every = 2 * 32 * 48, 4 * 3 * 32 * 48  # two experts of JetMoE, all of Llama 4
    assert receipt.gemms[0].flops_share == pytest.approx(chosen / (chosen + every))


def test_another_class_with_their_parts_is_not_taken_for_them() -> None:
    class Others(JetMoeParallelExperts):
        def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
            return inputs

    (found,) = nc.receipt(Others()).gemms
    assert found.reason == "experts that Others uses in its own code, which convert does not know"


def test_a_layer_whose_weight_is_read_and_never_called_stays() -> None:
    receipt = nc.receipt(nc.convert(MambaMixer(), CURRENT))
    reasons = {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}
    assert reasons.pop("dt_proj") == "MambaMixer reads its weight itself"
    assert set(reasons) == {""}  # A_log of the mixer itself


def test_what_did_not_run_in_a_recording_does_not_count() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.spare = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor, spare: bool = False) -> Tensor:
            return self.spare(x) if spare else self.called(x)

    model = nc.convert(Branches(), CURRENT)
    receipt = nc.receipt(model)
    assert receipt.flops_covered == 1.0 and receipt.idle == ()
    with receipt.recording():
        model(torch.randn(3, 64)).sum().backward()
    assert receipt.idle == ("spare",) and receipt.flops_covered == pytest.approx(0.5)
    assert receipt.parameters_covered == pytest.approx(0.5, abs=0.01)
    assert "did not run while recorded, and do not count: spare" in str(receipt)
    assert receipt.to_dict()["idle"] == ("spare",)
    with pytest.raises(AssertionError, match=r"50\.0% of the FLOPs .* 'spare' 50\.0% \(did not run"):
        receipt.assert_coverage(0.9)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda one: type(one).__name__)
def test_an_optimizer_writes_their_codes(
    recipe: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they are transposed; losses and weights are those without."""
    quantized: list[Any] = []
    quantize = operands.quantize_weights
    monkeypatch.setattr(
        operands, "quantize_weights", lambda *given: quantized.append(given) or quantize(*given)
    )
    made = []
    for written in (False, True):
        torch.manual_seed(0)
        experts = nc.convert(nn.ModuleList([Experts(transposed=transposed)]), recipe, small=True)[0]
        optimizer = nc.optimizers.FusedAdam(
            experts.parameters(), lr=1e-2, weight_codes=experts if written else None
        )
        assert experts.codes_are_written is (written and not transposed)
        x, chosen, weights = torch.randn(20, 32), torch.randint(4, (20, 2)), torch.rand(20, 2)
        found = []
        for _ in range(3):
            before = len(quantized)
            loss = experts(x, chosen, weights).square().sum()
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            assert len(quantized) == before or not experts.codes_are_written
        made.append([*found, *(parameter.sum().item() for parameter in experts.parameters())])
    assert made[0] == made[1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_first_step_follows_weights_that_were_written(whole: bool) -> None:
    """Of both linear layers, also where the experts are called without the model that has the recipe."""
    results = []
    for recipe in (nc.recipe.DelayedScaling(), nc.recipe.Float8CurrentScaling()):
        torch.manual_seed(0)
        model = nc.convert(nn.Sequential(Llama4TextExperts()), recipe)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(30.0)
        y = (model if whole else model[0])(torch.randn(4 * 7, 32))
        (y / y.detach().norm()).sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_and_its_gradient_are_sums_that_are_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, the gradients of a token's experts were added up by atomics, in another order at each call."""
    experts: Any = nc.convert(Experts().to(dtype), CURRENT)
    monkeypatch.setattr(type(experts), "_run", lambda self, x, splits: x)
    torch.manual_seed(0)
    x = torch.randn(50, 32, dtype=dtype, requires_grad=True)
    index, weights = route(50, 4)
    index[3, 1] = 4  # of no expert
    weights = weights.to(dtype)
    kept = torch.where(index < 4, weights.float(), 0)
    grad = torch.randn(50, 32, dtype=dtype)
    for run in experts, torch.compile(experts, backend="aot_eager", fullgraph=True):
        y = run(x, index, weights)
        total = sum((kept[:, c, None] * x.float() for c in range(2)), torch.zeros(50, 32))
        assert torch.equal(y, total.to(dtype))
        parts = [(kept[:, c, None] * grad.float()).to(dtype).float() for c in range(2)]
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], (parts[0] + parts[1]).to(dtype))
