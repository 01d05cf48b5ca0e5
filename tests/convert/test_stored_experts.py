"""Frozen experts as one quantized copy: the bits of plain weights with its values, at a part of the bytes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert.stored import DECODED
from narrowcast.tensors import GroupedTensor

from .models import Experts, JetMoeParallelExperts, Llama4TextExperts, route

STORED = {name: QUANTIZED[name] for name in ("delayed", "current", "block")}
WAYS = [("stored", name) for name in STORED] + [(weights, "current") for weights in DECODED]
BYTES = {"stored": 0.51, "nvfp4": 0.29, "mxfp4": 0.27, "mxfp6": 0.4, "mxfp8": 0.53, "fp8-channel": 0.8}
"""At most this share of bf16's, of matrices with a multiple of 128 rows."""


def frozen(width: int = 128, inner: int = 256, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    experts = Experts(width=width, inner=inner, **options)
    return experts.to(DEVICE, torch.bfloat16).requires_grad_(False)


def inputs(width: int, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    index, weights = route(tokens, 4)
    return x, index.to(DEVICE), weights.to(DEVICE, torch.bfloat16)


def step(experts: Any) -> tuple[Tensor, Tensor]:
    x, *routed = inputs(experts.gate_up_proj.shape[1 if experts.is_transposed else 2])
    out = experts(x, *routed)
    return out.detach(), torch.autograd.grad(out.float().square().sum(), x)[0]


@pytest.mark.parametrize("weights, name", WAYS)
@pytest.mark.parametrize("width, inner, transposed", [(128, 256, False), (96, 72, True), (40, 33, False)])
def test_outputs_and_gradients_are_those_of_plain_weights(
    weights: Any, name: str, width: int, inner: int, transposed: bool
) -> None:
    """``transposed``: the model has them as (E, K, N), as gpt-oss and Llama 4 do."""
    recipe, options = STORED[name], {"transposed": transposed, "bias": transposed}
    stored = nc.convert(frozen(width, inner, **options), recipe, weights=weights)
    assert stored.gate_up_proj.shape == frozen(width, inner, **options).gate_up_proj.shape
    assert isinstance(stored.gate_up_proj, GroupedTensor) and isinstance(stored.down_proj, GroupedTensor)
    plain = frozen(width, inner, **options)
    values = stored.state_dict()
    plain.load_state_dict({key: values[key] for key in plain.state_dict()})
    nc.convert(plain, recipe)
    for _ in range(2):
        ours, theirs = step(stored), step(plain)
        if weights != "stored" or name == "block":
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        for a, b in zip(ours, theirs):
            assert a.isfinite().all()
            assert torch.cosine_similarity(a.flatten().float(), b.flatten().float(), 0) > 0.999
    with nc.autocast(enabled=False):
        assert torch.equal(step(stored)[0], step(plain)[0])
    reverted = nc.revert(stored)
    assert type(reverted) is Experts and type(reverted.down_proj) is nn.Parameter
    assert torch.equal(reverted.down_proj, plain.down_proj)


@pytest.mark.parametrize("weights, name", WAYS)
def test_the_receipt_counts_their_bytes(weights: Any, name: str) -> None:
    model = nn.Sequential(frozen())
    before = nc.receipt(nc.convert(model, STORED[name], weights=weights))
    assert [one.stored for one in before.gemms] == [True, True]
    held = sum(
        buffer.nbytes
        for parameter in model.parameters()
        for buffer in parameter.get_data_tensors()
        if buffer is not None
    )
    assert before.memory.parameters == held
    assert held <= BYTES[weights] * before.memory.parameters_before


@pytest.mark.parametrize("weights, name", WAYS)
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_copied_and_pickled_experts_give_the_same(weights: Any, name: str, transposed: bool) -> None:
    experts = nc.convert(frozen(transposed=transposed), STORED[name], weights=weights)
    expected = step(experts)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert all(torch.equal(a, b) for a, b in zip(step(other), expected))
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    x, *routed = inputs(128)
    out = compiled(x, *routed)
    found = out.detach(), torch.autograd.grad(out.float().square().sum(), x)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_state_dict_is_plain_and_loads_to_the_same_values(transposed: bool) -> None:
    experts = nc.convert(frozen(transposed=transposed), STORED["block"], weights="stored")
    state = experts.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    again = nc.convert(frozen(transposed=transposed), STORED["block"], weights="stored")
    with torch.no_grad():
        again.down_proj.zero_()
    again.load_state_dict(state)
    assert isinstance(again.down_proj, GroupedTensor)
    assert torch.equal(again.down_proj.dequantize(), state["down_proj"])


def test_what_cannot_be_stored_says_so_beside_what_is() -> None:
    trained, every, jetmoe = frozen(), Llama4TextExperts(), JetMoeParallelExperts()
    trained.down_proj.requires_grad_(True)
    model = nn.ModuleList([trained, every.requires_grad_(False), jetmoe.requires_grad_(False)])
    receipt = nc.receipt(nc.convert(model, STORED["current"], weights="stored"))
    said = {one.name: (one.stored, one.reason) for one in receipt.gemms}
    assert said["0.gate_up_proj"] == (False, "its weight trains, and is not stored quantized")
    assert said["1.gate_up_proj"] == said["1.down_proj"] == said["2"] == (True, "")


def test_a_recording_sees_the_gemms_of_codes() -> None:
    """Memory that was freed is another tensor's by then: a gradient was taken for the weight that had lain there."""
    experts = nc.convert(frozen(), STORED["block"], weights="stored")
    receipt = nc.receipt(experts)
    with receipt.recording():
        step(experts)
    assert not receipt._recorders[0]._seen
    assert [(one.name, one.gemm) for one in receipt.ran()] == [
        (name, gemm) for name in ("gate_up_proj", "down_proj") for gemm in ("fprop", "dgrad")
    ]


@pytest.mark.parametrize("weights, name", WAYS)
@pytest.mark.parametrize("width, inner, transposed", [(128, 256, False), (96, 72, True), (40, 33, False)])
def test_decoding_runs_as_often_for_many_experts(
    weights: Any, name: str, width: int, inner: int, transposed: bool
) -> None:
    """One by one, 128 experts in four bits took four times as long as a step in bf16 on an H200."""
    options = {"transposed": transposed}
    stored: Any = nc.convert(frozen(width, inner, **options), STORED[name], weights=weights).gate_up_proj
    with torch.profiler.profile() as few:
        values = stored.dequantize()
    alone = torch.stack([one.dequantize() for one in stored.split_into_quantized_tensors()])
    assert torch.equal(values, alone.transpose(1, 2) if transposed else alone)
    more: Any = nc.convert(frozen(width, inner, experts=12, **options), STORED[name], weights=weights)
    with torch.profiler.profile() as many:
        more.gate_up_proj.dequantize()
    views = "aten::as_strided", "aten::slice", "aten::view"
    calls = [
        Counter(
            {
                one.key: one.count
                for one in run.key_averages()
                if one.key.startswith("aten::") and one.key not in views
            }
        )
        for run in (few, many)
    ]
    assert calls[0].total() and calls[0] == calls[1]
