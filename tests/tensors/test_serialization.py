"""Pickles, checkpoints and state dicts."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from quantizers.catalog import (
    ONE_OF_EACH,
    USAGES,
    VARIANTS,
    assert_own_memory,
    assert_same_buffers,
    delayed,
    quantize,
)
from recipes import QUANTIZED
from reference.checks import normal
from torch import nn

import narrowcast as nc
from narrowcast.tensors.quantized_tensor import rebuild_quantized_tensor

BF16 = torch.bfloat16
WITH_DELAYED = {
    **VARIANTS,
    "delayed": delayed(),
    "hybrid": nc.HybridQuantizer(
        rowwise_quantizer=VARIANTS["mxfp8"], columnwise_quantizer=VARIANTS["nvfp4 rht"]
    ),
}


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_round_trips(name: str, usage: tuple[bool, bool]) -> None:
    tensor = quantize(WITH_DELAYED[name].with_usage(*usage), normal((33, 50), BF16))
    for again in (
        pickle.loads(pickle.dumps(tensor)),
        saved_and_loaded({"weight": [tensor]}, weights_only=True)["weight"][0],
        saved_and_loaded(tensor, weights_only=False),
    ):
        assert type(again) is type(tensor) and not isinstance(again, nn.Parameter)
        assert again.dtype == BF16 and tuple(again.shape) == (33, 50)
        assert_same_buffers(again, tensor)
        assert_own_memory(again, tensor)
        assert name == "delayed" or again._quantizer == tensor._quantizer
        assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parameters_come_back_as_parameters(name: str) -> None:
    for trainable in (True, False):
        weight: Any = nn.Parameter(
            quantize(ONE_OF_EACH[name], normal((33, 50), BF16)), requires_grad=trainable
        )
        for again in (pickle.loads(pickle.dumps(weight)), saved_and_loaded(weight, weights_only=True)):
            assert isinstance(again, nn.Parameter) and type(again) is type(weight)
            assert again.requires_grad is trainable and again.is_leaf
            assert_same_buffers(again, weight)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bare_storages_pickle(name: str) -> None:
    storage = ONE_OF_EACH[name].replace(internal=True).quantize(normal((33, 50), BF16))
    again = pickle.loads(pickle.dumps(storage))
    assert type(again) is type(storage)
    assert_same_buffers(again, storage)
    assert torch.equal(again.dequantize(), storage.dequantize())


def quantized_linear(name: str) -> Any:
    with nc.quantized_model_init(recipe=QUANTIZED[name]):
        return nc.Linear(50, 33, device="cpu", params_dtype=BF16)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_state_dict_holds_plain_tensors(name: str) -> None:
    module = quantized_linear(name)
    state = module.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert torch.equal(state["weight"], module.weight.dequantize().detach())
    state = saved_and_loaded(state, weights_only=True)
    plain = nc.Linear(50, 33, device="cpu", params_dtype=BF16)
    plain.load_state_dict(state, strict=False)
    assert torch.equal(plain.weight, state["weight"])
    other = quantized_linear(name)
    assert not torch.equal(other.weight.dequantize(), module.weight.dequantize())
    other.load_state_dict(state)
    expected = other.weight._quantizer.quantize(state["weight"])
    assert type(other.weight) is type(expected) and isinstance(other.weight, nn.Parameter)
    assert_same_buffers(other.weight, expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_with_keep_vars_a_state_dict_holds_all_bits(name: str, assign: bool) -> None:
    module, other = quantized_linear(name), quantized_linear(name)
    nc.set_recipe(module, QUANTIZED[name])
    nc.set_recipe(other, QUANTIZED[name])
    state = saved_and_loaded(module.state_dict(keep_vars=True), weights_only=True)
    other.load_state_dict(state, assign=assign)
    assert isinstance(other.weight, nn.Parameter)
    assert_same_buffers(other.weight, module.weight)
    results = []
    for layer in (module, other):
        torch.manual_seed(3)
        x = torch.linspace(-2, 2, 1600).view(32, 50).bfloat16().requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_whole_module_pickles(name: str) -> None:
    module = quantized_linear(name)
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again.weight, nn.Parameter) and [n for n, _ in again.named_parameters()] == [
        "weight",
        "bias",
    ]
    assert_same_buffers(again.weight, module.weight)
    x = normal((8, 50), BF16)
    with nc.autocast(recipe=QUANTIZED[name]):
        assert torch.equal(again(x), module(x))


@pytest.mark.parametrize("cls", [int, nn.Parameter, "MXFP8Tensor", nc.MXFP8TensorStorage], ids=str)
def test_a_file_of_another_class_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="it was not saved by narrowcast"):
        rebuild_quantized_tensor(cls, {}, False)
