"""What ran, by the operators' own count, in eager and in compiled code; nothing is counted unless it is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import nn

import narrowcast as nc
from narrowcast.convert import RanGemm

from .models import Experts, Model, route

CURRENT = nc.recipe.Float8CurrentScaling(emulate=DEVICE == "cuda")
WORDS = torch.arange(24, device=DEVICE).view(2, 12)
NAMES = [f"layers.{block}.{name}" for block in range(2) for name in ("up", "gate", "down")]


def ways(receipt: Any) -> dict[tuple[str, str], RanGemm]:
    return {(one.name, one.gemm): one for one in receipt.ran()}


def forward_of(model: nn.Module, compiled: bool) -> Any:
    if not compiled:
        return model
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_gemm_is_counted_and_finds_its_layer(compiled: bool) -> None:
    model = Model().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT, skip="head"))
    model.layers[1].gate.weight.requires_grad_(False)
    forward = forward_of(model, compiled)
    with receipt.recording():
        for _ in range(2):
            forward(WORDS).square().sum().backward()
    ran = ways(receipt)
    expected = {(name, gemm) for name in NAMES for gemm in ("fprop", "dgrad", "wgrad")}
    assert set(ran) == expected - {("layers.1.gate", "wgrad")}
    assert {one.calls for one in ran.values()} == {2}
    assert {one.compiled for one in ran.values()} == {compiled}
    assert {one.emulated for one in ran.values()} == {True}
    assert ran["layers.0.up", "fprop"].precision == "E4M3 x E4M3 (FP8 current)"
    assert ran["layers.0.up", "wgrad"].precision == "E5M2 x E4M3 (FP8 current)"
    assert receipt.ran().idle == ()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("delayed", "E4M3 x E4M3 (FP8 delayed, FP8 current)"),
        ("current", "E4M3 x E4M3 (FP8 current)"),
        ("rowwise", "E4M3 x E4M3 (FP8 rowwise)"),
        ("block", "E4M3 x E4M3 (FP8 block)"),
        ("mxfp8", "E4M3 x E4M3 (MXFP8)"),
        ("nvfp4", "E2M1 x E2M1 (NVFP4)"),
    ],
)
def test_a_precision_has_the_words_of_recipes(name: str, told: str) -> None:
    model = nc.convert(nn.Linear(32, 32), name)
    receipt = nc.receipt(model)
    with receipt.recording():
        model(torch.randn(32, 32))
    assert [one.precision for one in receipt.ran()] == [told]


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_every_recipe_is_seen(recipe: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).to(DEVICE)
    receipt = nc.receipt(nc.convert(model, recipe))
    with receipt.recording():
        model(torch.randn(16, 32, device=DEVICE, requires_grad=True)).sum().backward()
    assert {key: one.calls for key, one in ways(receipt).items()} == {
        (name, gemm): 1 for name in "01" for gemm in ("fprop", "dgrad", "wgrad")
    }


def test_experts_are_seen() -> None:
    experts = Experts().to(DEVICE)
    receipt = nc.receipt(nc.convert(experts, CURRENT))
    index, weights = (x.to(DEVICE) for x in route(20, 4))
    with receipt.recording():
        experts(torch.randn(20, 32, device=DEVICE, requires_grad=True), index, weights).sum().backward()
    assert set(ways(receipt)) == {
        (name, gemm) for name in ("gate_up_proj", "down_proj") for gemm in ("fprop", "dgrad", "wgrad")
    }


def test_what_did_not_run_is_named_and_a_recomputation_counts() -> None:
    model = Model().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT, heads=True))
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    with receipt.recording():
        torch.utils.checkpoint.checkpoint(model.layers[0], x, use_reentrant=False).sum().backward()
    assert ways(receipt)["layers.0.up", "fprop"].calls == 2
    assert receipt.ran().idle == (*NAMES[3:], "head")
    assert "under a recipe, but none ran: layers.1.up" in str(receipt.ran())
    with receipt.recording(), nc.autocast(enabled=False):
        model(WORDS).sum().backward()
    assert not receipt.ran().gemms and "no GEMM of narrowcast ran" in str(receipt.ran())


def test_the_numbers_are_those_of_an_unrecorded_step() -> None:
    model = Model().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT, heads=True))
    plain = model(WORDS)
    with receipt.recording():
        assert torch.equal(model(WORDS), plain)
    lines = str(receipt.ran()).splitlines()
    assert lines[0].split() == ["weight", "GEMM", "precision", "run", "code", "calls"]
    assert len(receipt.ran().gemms) == 7 and len(lines) == 2 + 4  # equal layers are one row
    assert [line.split()[0] for line in lines[2:]] == [
        *(re.sub(r"\d", "0-1", name) for name in NAMES[:3]),
        "head",
    ]
    assert repr(receipt.ran()) == str(receipt.ran()) and repr(receipt) == str(receipt)


def test_it_must_be_asked_for() -> None:
    model = Model().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT))
    model(WORDS)
    with pytest.raises(RuntimeError, match=r"with receipt\.recording\(\)"):
        receipt.ran()
    del model
    with pytest.raises(RuntimeError, match="the Model of this receipt is gone"), receipt.recording():
        pass


def test_weight_gradients_of_one_merged_input_name_all_that_they_may_belong_to() -> None:
    """The compiler quantizes a shared input once; without a dgrad nothing tells the layers' gradients apart."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x).sin()

    model = Shared().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT))
    with receipt.recording():
        forward_of(model, True)(torch.randn(16, 32, device=DEVICE)).sum().backward()
    told = {(one.name, one.gemm): one.calls for one in receipt.ran()}
    assert told == {("q", "fprop"): 1, ("k", "fprop"): 1, ("q or k", "wgrad"): 2}
    assert receipt.ran().idle == ()


def test_native_gemms_outside_of_operators_are_counted_without_a_layer() -> None:
    """As compiled graphs on a GPU call them; here by hand."""
    model = Model().to(DEVICE)
    receipt = nc.receipt(nc.convert(model, CURRENT))
    codes, one = torch.ones(32, 32, device=DEVICE).to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    with receipt.recording():
        torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)
    assert receipt.ran().inlined == 1
    shown = str(receipt.ran())
    assert "1 native GEMMs that compiled graphs called themselves" in shown
    assert "under a recipe, but none was seen by name: layers.0.up" in shown
    with receipt.recording():
        model(WORDS)
    assert receipt.ran().inlined == 0
