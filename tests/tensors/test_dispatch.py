"""Operators on wrappers: in-place ones requantize, ``copy_`` moves bytes where it can, keywords go by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import (
    E4M3,
    E5M2,
    ONE_OF_EACH,
    VARIANTS,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import normal
from torch import nn

import narrowcast as nc

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
each_quantizer = pytest.mark.parametrize("name", WITH_DELAYED)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)
SHAPE = (33, 50)


def tensor_of(name: str, seed: int = 0) -> Any:
    return quantize(WITH_DELAYED[name], normal(SHAPE, BF16, seed=seed))


def requantized(tensor: Any, value: torch.Tensor) -> Any:
    """What the tensor must hold after being given this value."""
    return quantize(tensor._quantizer, value)


@each_quantizer
def test_copy_between_equal_formats_moves_bytes(name: str) -> None:
    target, source = tensor_of(name), tensor_of(name, seed=1)
    assert target.copy_(source) is target
    assert_same_buffers(target, source)
    other_dtype = source.to_dtype(torch.float32)
    target.zero_().copy_(other_dtype)
    assert_same_buffers(target, source)
    assert target.dtype == BF16


@each_quantizer
def test_copy_from_plain_quantizes(name: str) -> None:
    target, value = tensor_of(name), normal(SHAPE, torch.float32, seed=1)
    torch.manual_seed(3)
    target.copy_(value)
    expected = requantized(target, value)
    for key, buffer in buffers(target).items():
        assert torch.equal(buffer, buffers(expected)[key].to(buffer.dtype)), key
    target.copy_(torch.full((50,), 2.0))
    assert torch.allclose(target.float(), torch.full(SHAPE, 2.0), rtol=0.07)


@each_quantizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
def test_copy_from_a_dtype_that_is_not_quantized_casts_first(name: str, dtype: torch.dtype) -> None:
    target, value = tensor_of(name), normal(SHAPE, torch.float32).mul(5).to(dtype)
    torch.manual_seed(3)
    target.copy_(value)
    assert_same_buffers(target, requantized(target, value.to(BF16)))


@each_quantizer
def test_copy_into_plain_dequantizes(name: str) -> None:
    source, target = tensor_of(name), torch.zeros(SHAPE)
    assert target.copy_(source) is target
    assert type(target) is torch.Tensor and torch.equal(target, source.dequantize().float())


def test_copy_between_formats_goes_through_the_value() -> None:
    for source in (tensor_of("mxfp8"), nc.Float8CurrentScalingQuantizer(E5M2).quantize(normal(SHAPE, BF16))):
        target = tensor_of("current", seed=2)
        target.copy_(source)
        assert_same_buffers(target, ONE_OF_EACH["current"].quantize(source.dequantize()))
        assert target._quantizer == ONE_OF_EACH["current"]
    narrow = nc.Float8CurrentScalingQuantizer(E4M3, columnwise=False).quantize(torch.zeros(SHAPE, dtype=BF16))
    narrow.copy_(tensor_of("current"))
    assert narrow.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(narrow.dequantize(), tensor_of("current").dequantize())


IN_PLACE = {
    "add_": lambda t, other: t.add_(other, alpha=2),
    "mul_ scalar": lambda t, other: t.mul_(3.0),
    "addcmul_": lambda t, other: t.addcmul_(other, other, value=0.5),
    "addcdiv_": lambda t, other: t.addcdiv_(other, other.abs() + 1, value=-2),
    "lerp_": lambda t, other: t.lerp_(other, weight=0.25),
    "zero_": lambda t, other: t.zero_(),
    "fill_": lambda t, other: t.fill_(1.5),
    "clamp_": lambda t, other: t.clamp_(min=-0.5, max=0.5),
    "masked_fill_": lambda t, other: t.masked_fill_(other > 0, value=1.0),
    "out=": lambda t, other: torch.add(other, t, out=t),
    "out= by name": lambda t, other: torch.sub(input=other, other=t, alpha=3, out=t),
}


@pytest.mark.parametrize("operation", IN_PLACE)
@one_of_each
def test_in_place_operators_requantize_into_the_same_buffers(name: str, operation: str) -> None:
    tensor, other = tensor_of(name), normal(SHAPE, BF16, seed=1)
    pointers = {key: b.data_ptr() for key, b in buffers(tensor).items()}
    plain = IN_PLACE[operation](tensor.dequantize(), other)
    assert IN_PLACE[operation](tensor, other) is tensor
    assert_same_buffers(tensor, requantized(tensor, plain))
    assert pointers == {key: b.data_ptr() for key, b in buffers(tensor).items()}
    version = tensor._version
    IN_PLACE[operation](tensor, other)
    assert tensor._version > version


def test_keyword_arguments_are_paired_by_name() -> None:
    """The first tensor is read, the last written, and all three are quantized."""
    a, b, out = tensor_of("current"), tensor_of("mxfp8", seed=1), tensor_of("block", seed=2)
    kept = [t.dequantize() for t in (a, b)]
    assert torch.add(a, b, alpha=2, out=out) is out
    assert_same_buffers(out, ONE_OF_EACH["block"].quantize(torch.add(*kept, alpha=2)))
    assert torch.equal(a.dequantize(), kept[0]) and torch.equal(b.dequantize(), kept[1])
    plain = torch.zeros(SHAPE, dtype=BF16)
    assert torch.add(a, other=b, out=plain) is plain
    assert torch.equal(plain, kept[0] + kept[1])
    target = a.dequantize()
    assert target.addcmul_(tensor1=b, tensor2=b, value=2) is target
    assert torch.equal(target, kept[0].clone().addcmul_(kept[1], kept[1], value=2))


def test_several_outputs_come_back_as_given() -> None:
    values, places = (
        nc.IdentityQuantizer().quantize(torch.zeros(50, dtype=BF16)),
        torch.zeros(50, dtype=torch.long),
    )
    source = tensor_of("mxfp8")
    result = torch.max(source, 0, out=(values, places))
    expected = torch.max(source.dequantize(), 0)
    assert result[0] is values and result[1] is places
    assert torch.equal(values.dequantize(), expected.values) and torch.equal(places, expected.indices)


def test_lists_of_tensors() -> None:
    tensors: list[Any] = [tensor_of("current"), torch.ones(SHAPE, dtype=BF16), tensor_of("mxfp8")]
    expected = [t.dequantize() + 1 if isinstance(t, nc.QuantizedTensor) else t + 1 for t in tensors]
    torch._foreach_add_(tensors, 1.0)
    for tensor, value in zip(tensors, expected, strict=True):
        if isinstance(tensor, nc.QuantizedTensor):
            assert_same_buffers(tensor, requantized(tensor, value))
        else:
            assert torch.equal(tensor, value)
    assert all(type(t) is torch.Tensor for t in torch._foreach_mul(tensors, 2.0))


@one_of_each
def test_assigning_to_an_index_reaches_the_tensor(name: str) -> None:
    tensor = tensor_of(name)
    for index, value in (
        (3, 0.25),
        ((slice(None), 7), torch.ones(33, dtype=BF16)),
        (normal(SHAPE, BF16, seed=4) > 1, 0.5),
        ((slice(2, 5), slice(0, 16)), tensor_of("identity")[:3, :16]),
        (slice(None), tensor_of("mxfp8", seed=2)),
    ):
        plain = tensor.dequantize()
        plain[index] = value.dequantize() if isinstance(value, nc.QuantizedTensor) else value
        tensor[index] = value
        assert_same_buffers(tensor, requantized(tensor, plain))
    weight = nn.Parameter(tensor)
    with pytest.raises(RuntimeError, match="requires grad; use torch.no_grad"):
        weight[0] = 1.0
    with torch.no_grad():
        weight[0] = 1.0
    assert torch.allclose(weight.detach()[0].float(), torch.ones(50), rtol=0.07)


def test_a_leaf_that_needs_a_gradient_is_protected() -> None:
    weight = nn.Parameter(tensor_of("current"))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.add_(1)


def test_empty_like_goes_through_the_quantizer_and_the_rest_is_plain() -> None:
    tensor = tensor_of("mxfp8")
    empty: Any = torch.empty_like(tensor, dtype=torch.float16)
    assert type(empty) is type(tensor) and empty.dtype == torch.float16 and empty.shape == tensor.shape
    assert empty._quantizer == tensor._quantizer
    for other in (
        torch.zeros_like(tensor),
        torch.ones_like(tensor),
        torch.randn_like(tensor),
        tensor.new_zeros(3),
    ):
        assert type(other) is torch.Tensor and other.dtype == BF16


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    # without decay, which would be a second in-place operator and so a second rounding
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
}


@pytest.mark.parametrize("mode", ["default", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@one_of_each
def test_optimizers_change_the_value(name: str, optimizer: str, mode: str) -> None:
    cls, options = OPTIMIZERS[optimizer]
    options = options if mode == "default" else {**options, mode: True}
    value = normal((32, 48), torch.float32)
    weight: Any = nn.Parameter(quantize(ONE_OF_EACH[name], value))
    plain = nn.Parameter(weight.detach().dequantize())
    pointers = {key: b.data_ptr() for key, b in buffers(weight).items()}
    ours, theirs = cls([weight], **options), cls([plain], **options)
    for step in range(2):
        for p in (weight, plain):
            p.grad = normal((32, 48), torch.float32, seed=step)
        with pytest.warns(UserWarning, match="small steps change nothing"):
            ours.step()
        theirs.step()
        assert_same_buffers(weight, ONE_OF_EACH[name].quantize(plain.detach()))
        with torch.no_grad():
            plain.copy_(weight)
        ours.zero_grad()
        assert weight.grad is None
    assert pointers == {key: b.data_ptr() for key, b in buffers(weight).items()}
    for state in ours.state[weight].values():
        assert type(state) is torch.Tensor  # moments stay in high precision


@one_of_each
def test_the_address_is_that_of_the_codes(name: str) -> None:
    """What tells parameters apart by their memory, as accelerate does, reads it."""
    tensor = tensor_of(name)
    assert tensor.data_ptr() == next(iter(buffers(tensor).values())).data_ptr() != 0
