"""Routers stay in high precision: rounded logits send tokens to other experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc

from .models import Gate, Mixture, Model

CURRENT = nc.recipe.Float8CurrentScaling()
REASON = "a router, whose rounding would change experts; routers=True converts it"
GATES = {
    "": lambda: nn.Linear(32, 4, bias=False),
    **{name: (lambda name=name: Gate(name, 32, 4)) for name in ("wg", "classifier", "layer")},
}


def kept(receipt: Any) -> dict[str, str]:
    return {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}


@pytest.mark.parametrize("kind", ["list", "dict", "stacked", "own"])
@pytest.mark.parametrize("gate", list(GATES))
def test_routers_beside_experts_stay(gate: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Mixture(GATES[gate](), kind))
    x = torch.randn(16, 32)
    before = model[1].gate(x)
    router = f"1.gate.{gate}".rstrip(".")
    expected = {router: REASON, "1.shared_expert_gate": REASON}
    found = kept(nc.convert(model, CURRENT, dry_run=True))
    found.pop("1", None)  # weights of the mixture itself, whose forward is not known
    assert found == expected
    receipt = nc.receipt(nc.convert(model, CURRENT))
    assert torch.equal(model[1].gate(x), before)
    assert type(model[1].shared_expert_gate) is nn.Linear and isinstance(model[1].shared, nc.Linear)
    model(x).sum().backward()
    assert "routers=True converts it" in str(receipt)


@pytest.mark.parametrize("name", ["gate", "wg", "expert_gate", "router"])
def test_a_gate_of_as_many_experts_as_inputs_stays(name: str) -> None:
    """Where the sizes do not tell it from a projection, its name does."""
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(16))
    model = nn.ModuleDict({name: nn.Linear(16, 16), "experts": experts})
    assert kept(nc.convert(model, CURRENT, dry_run=True)) == {name: REASON}


def test_routers_are_converted_on_request() -> None:
    model = Mixture(GATES["wg"]())
    receipt = nc.receipt(nc.convert(model, CURRENT, routers=True))
    assert isinstance(model.gate.wg, nc.Linear) and isinstance(model.shared_expert_gate, nc.Linear)
    assert kept(receipt) == {}
    only = Mixture(GATES["wg"]())
    nc.convert(only, CURRENT, only="gate.wg", routers=True)
    assert isinstance(only.gate.wg, nc.Linear) and type(only.shared) is nn.Linear


def test_other_linear_layers_are_no_routers() -> None:
    """Lists of blocks, heads of as many classes as there are blocks, projections of the experts' number."""
    blocks = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), "head": nn.Linear(32, 4)}
    )
    heads = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(32, 4), nn.Linear(32, 1))
    for model in (blocks, heads, Model()):
        assert not any(
            "router" in reason for reason in kept(nc.receipt(nc.convert(model, CURRENT, small=True))).values()
        )
    mixture = Mixture(nn.Linear(32, 4))
    mixture.experts[0] = nn.Linear(32, 32)
    mixture.block = Gate("up", 4, 4)  # type: ignore[assignment]  # no more inputs than experts
    mixture.attention = nn.ModuleDict({"k": nn.Linear(32, 4), "v": nn.Linear(32, 4)})  # several linear layers
    assert set(kept(nc.receipt(nc.convert(mixture, CURRENT, small=True)))) == {"gate", "shared_expert_gate"}


def test_a_router_beside_grouped_layers_stays() -> None:
    model = nn.ModuleDict({"router": nn.Linear(32, 4), "fc1": nc.GroupedLinear(4, 32, 48, device="cpu")})
    with pytest.raises(ValueError, match=f"nothing in this ModuleDict; 'router': {REASON}"):
        nc.convert(model, CURRENT)
    model["other"] = nn.Linear(32, 32)
    assert kept(nc.receipt(nc.convert(model, CURRENT))) == {"router": REASON}


def test_a_gate_as_wide_as_its_input_stays() -> None:
    """Found by the fuzzer: 16 experts of width 16."""
    model = nn.ModuleDict(
        {
            "gate": nn.Linear(16, 16),
            "up": nn.Linear(16, 16),
            "experts": nn.ModuleList(nn.Linear(16, 16) for _ in range(16)),
        }
    )
    assert kept(nc.receipt(nc.convert(model, CURRENT))) == {"gate": REASON}
