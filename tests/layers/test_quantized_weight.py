"""``quantize_weight``: its branches in their order, and the memory that a refresh writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import ONE_OF_EACH, VARIANTS, buffers, quantize

import narrowcast as nc
from narrowcast.layers import quantized_weight
from narrowcast.nn import quantize_weight, scatter_workspace

W = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
each = pytest.mark.parametrize("name", ONE_OF_EACH)


def pointers(tensor: Any) -> list[int]:
    return [buffer.data_ptr() for buffer in tensor.get_data_tensors() if buffer is not None]


@each
def test_made_without_a_cache(name: str) -> None:
    quantizer = ONE_OF_EACH[name].replace(internal=True)
    weight, new = quantize_weight(tensor=W, quantizer=quantizer)
    assert new is None and not isinstance(weight, torch.Tensor)
    assert torch.equal(weight.dequantize(), quantizer.quantize(W).dequantize())


@each
def test_made_to_be_kept_then_refreshed_in_place(name: str) -> None:
    quantizer = ONE_OF_EACH[name].replace(internal=True)
    weight, kept = quantize_weight(tensor=W, quantizer=quantizer, cache=True, workspace_dtype=torch.bfloat16)
    assert kept is weight and isinstance(kept, nc.QuantizedTensor) and kept.dtype == torch.bfloat16
    before, values = pointers(kept), kept.dequantize()
    again, new = quantize_weight(tensor=W * 4, quantizer=quantizer, workspace=kept, update_workspace=False)
    assert again is kept and new is None and torch.equal(kept.dequantize(), values)
    quantize_weight(tensor=W * 4, workspace=kept, update_workspace=False, skip_update_flag=torch.ones(1))
    assert torch.equal(kept.dequantize(), values)
    quantize_weight(
        tensor=W * 4, quantizer=quantizer, workspace=kept, update_workspace=False, skip_update_flag=torch.zeros(1)
    )  # fmt: skip
    assert torch.equal(kept.dequantize(), quantizer.quantize(W * 4).dequantize(dtype=torch.bfloat16))
    quantize_weight(tensor=W, quantizer=quantizer, workspace=kept)
    assert torch.equal(kept.dequantize(), values) and pointers(kept) == before


@pytest.mark.parametrize(
    "name", [name for name in ONE_OF_EACH if name != "identity"]
)  # whose directions are one
def test_a_workspace_that_lacks_a_direction_is_made_anew(name: str) -> None:
    quantizer = ONE_OF_EACH[name]
    _, kept = quantize_weight(tensor=W, quantizer=quantizer.with_usage(columnwise=False), cache=True)
    weight, new = quantize_weight(tensor=W, quantizer=quantizer, workspace=kept, cache=True)
    assert weight is new and new is not kept and new.get_usages()["columnwise"]
    other = nc.IdentityQuantizer()
    assert quantize_weight(tensor=W, quantizer=other, workspace=kept, cache=True)[1] is not kept


@each
def test_quantized_weights_are_taken_as_they_are(name: str) -> None:
    quantizer = ONE_OF_EACH[name]
    weight = torch.nn.Parameter(quantizer.quantize(W))
    rowwise = quantizer.with_usage(columnwise=False)
    assert quantize_weight(tensor=weight, quantizer=rowwise, cache=True) == (weight, None)
    assert weight.get_usages() == {"rowwise": True, "columnwise": True}


def test_a_missing_direction_is_made_once() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    weight: Any = quantizer.with_usage(columnwise=False).quantize(W)
    quantize_weight(tensor=weight, quantizer=quantizer)
    made = pointers(weight)
    assert weight.get_usages()["columnwise"] and len(made) == 3
    quantize_weight(tensor=weight, quantizer=quantizer)
    assert pointers(weight) == made


@each
def test_the_parts_of_two_ranks_are_gathered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, scattered = ONE_OF_EACH[name].replace(internal=True), []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        _, kept = quantize_weight(tensor=W, quantizer=quantizer, cache=True)
        expected = [None if one is None else one.clone() for one in kept.get_data_tensors()]
        scatter_workspace(kept, "two")
        scattered.append(kept)
    first, second = (buffers(one) for one in scattered)
    parts = {part.data_ptr(): second[name] for name, part in first.items()}

    def gather(whole: torch.Tensor, part: torch.Tensor, group: str) -> None:
        assert whole.numel() == 2 * part.numel() and group == "two"
        whole.copy_(torch.cat([part, parts[part.data_ptr()]]))

    monkeypatch.setattr(quantized_weight, "all_gather_single", gather)
    weight, _ = quantize_weight(
        quantizer=quantizer, workspace=scattered[0], update_workspace=False, fsdp_group="two"
    )
    for ours, theirs in zip(weight.get_data_tensors(), expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@each
def test_a_kept_weight_that_is_used_again_traces(name: str) -> None:
    quantizer = ONE_OF_EACH[name]
    _, kept = quantize_weight(tensor=W, quantizer=quantizer, cache=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        weight, new = quantize_weight(
            tensor=x, quantizer=quantizer, workspace=kept, update_workspace=False, cache=True
        )
        assert new is None
        return weight.dequantize() + 1

    torch._dynamo.reset()
    expected = quantizer.quantize(W).dequantize() + 1
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(W * 4), expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "nvfp4"])
def test_layers_take_a_weight_of_rows_alone(recipe: str, compiled: bool) -> None:
    """In formats whose columns follow from the rows: the gradients are those of a weight in both directions."""
    torch._dynamo.reset()
    with nc.quantized_model_init(recipe=recipe):
        both: Any = nc.Linear(96, 65, device="cpu", recipe=recipe).weight.detach()
    rows = both.clone()
    rows.update_usage(columnwise_usage=False)
    x, results = torch.randn(33, 96, requires_grad=True), []
    for weight in (rows, both):
        layer = nc.Linear(96, 65, bias=False, device="cpu", recipe=recipe)
        layer.weight = torch.nn.Parameter(weight)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        torch.manual_seed(0)  # of stochastic rounding
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}


def test_errors() -> None:
    quantizer = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
    _, kept = quantize_weight(tensor=W, quantizer=quantizer, cache=True)
    with pytest.raises(ValueError, match="to be refreshed, and tensor is None"):
        quantize_weight(quantizer=quantizer, workspace=kept)
    with pytest.raises(ValueError, match="and tensor is None"):
        quantize_weight(quantizer=quantizer)
    with pytest.raises(ValueError, match="and quantizer is None"):
        quantize_weight(tensor=W)


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_a_rank_keeps_its_part_of_what_divides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    workspace = quantize(VARIANTS[name].replace(internal=True), torch.randn(64, 96))
    before = {name: buffer.clone() for name, buffer in buffers(workspace).items()}
    scatter_workspace(workspace, None)
    for attribute, whole in before.items():
        part = getattr(workspace, attribute)
        if whole.numel() % 4:
            assert torch.equal(part, whole)
        else:
            assert torch.equal(part, whole.flatten().chunk(4)[1])
            assert part.untyped_storage().nbytes() == part.nbytes
    assert tuple(workspace.size()) == (64, 96)
