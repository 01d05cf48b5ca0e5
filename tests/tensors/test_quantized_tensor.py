"""Wrappers as tensors and parameters: copies, conversions, dtypes and devices, gradients, ``.data``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantizers.catalog import (
    E4M3,
    ONE_OF_EACH,
    VARIANTS,
    assert_own_memory,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import normal
from torch import nn

import narrowcast as nc
from narrowcast.tensors import storage_of

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
SHAPES = [(64, 96), (33, 50), (2, 3, 50)]
each_quantizer = pytest.mark.parametrize("name", WITH_DELAYED)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def parameter(name: str, shape: tuple[int, ...] = (33, 50), dtype: torch.dtype = BF16) -> Any:
    return nn.Parameter(quantize(WITH_DELAYED[name], normal(shape, dtype)))


@each_quantizer
def test_a_parameter_is_the_wrapper_itself(name: str) -> None:
    for shape in SHAPES:
        tensor = quantize(WITH_DELAYED[name], normal(shape, BF16))
        weight: Any = nn.Parameter(tensor)
        assert isinstance(weight, nn.Parameter) and type(weight) is type(tensor)
        assert weight.requires_grad and weight.is_leaf
        assert tuple(weight.shape) == shape and weight.dtype == BF16 and weight.device.type == "cpu"
        assert weight.is_contiguous() and weight.numel() == normal(shape, BF16).numel()
        assert_same_buffers(weight, tensor)
        assert not nn.Parameter(tensor, requires_grad=False).requires_grad


@each_quantizer
@pytest.mark.parametrize("leaf", [False, True], ids=["tensor", "parameter"])
def test_detach_alias_and_view_share_buffers(name: str, leaf: bool) -> None:
    tensor = parameter(name) if leaf else quantize(WITH_DELAYED[name], normal((33, 50), BF16))
    views = (
        tensor.detach(),
        tensor.data,
        torch.ops.aten.alias(tensor),
        tensor.view(33, 50),
        tensor.view_as(tensor),
    )
    for other in (*views, tensor.expand_as(tensor), tensor.contiguous(), tensor.reshape(33, 50)):
        assert type(other) is type(tensor) and other._quantizer is tensor._quantizer
        assert list(map(id, buffers(other).values())) == list(map(id, buffers(tensor).values()))
    assert not tensor.detach().requires_grad and not tensor.data.requires_grad
    assert torch.ops.aten.alias(tensor).requires_grad is leaf


@each_quantizer
def test_copies_own_their_memory(name: str) -> None:
    weight = parameter(name)
    for other in (
        weight.clone(),
        weight.detach().clone(),
        copy.deepcopy(weight),
        copy.deepcopy(weight.detach()),
    ):
        assert type(other) is type(weight) and other.dtype == BF16
        assert_same_buffers(other, weight)
        assert_own_memory(other, weight)
    twin = copy.deepcopy(weight)
    assert isinstance(twin, nn.Parameter) and twin.requires_grad and twin.is_leaf
    assert weight.clone().requires_grad and not weight.clone().is_leaf
    weight.grad = torch.ones(33, 50, dtype=BF16)
    assert torch.equal(copy.deepcopy(weight).grad, weight.grad)


def test_a_deep_copy_of_delayed_scaling_has_state_of_its_own() -> None:
    weight = parameter("delayed")
    twin = copy.deepcopy(weight)
    twin._quantizer.scale.fill_(9.0)
    assert weight._quantizer.scale.item() != 9.0


@each_quantizer
def test_conversions_dequantize(name: str) -> None:
    tensor = quantize(WITH_DELAYED[name], normal((33, 50), BF16))
    for converted, dtype in (
        (tensor.float(), torch.float32),
        (tensor.half(), torch.float16),
        (tensor.bfloat16(), BF16),
        (tensor.dequantize(dtype=torch.float16), torch.float16),
    ):
        assert type(converted) is torch.Tensor
        assert torch.equal(converted, tensor.dequantize(dtype=torch.float32).to(dtype))


@one_of_each
def test_nominal_dtype_and_device_change_without_requantizing(name: str) -> None:
    weight = parameter(name)
    other = weight.to_dtype(torch.float16)
    assert type(other) is type(weight) and other.dtype == other._dtype == torch.float16
    assert_same_buffers(other, weight)
    assert torch.equal(other.dequantize(), weight.dequantize(dtype=torch.float16))
    assert weight.to("cpu") is weight
    copied = weight.detach().to("cpu", copy=True)
    assert type(copied) is type(weight)
    assert_own_memory(copied, weight)
    meta = weight.detach().to("meta")
    assert type(meta) is type(weight) and meta.device.type == "meta"
    assert all(b.device.type == "meta" for b in buffers(meta).values())


@one_of_each
@pytest.mark.parametrize("nominal", [BF16, torch.float32], ids=str)
def test_a_copy_in_a_dtype_is_plain(name: str, nominal: torch.dtype) -> None:
    """Such as a master copy, which has to keep updates that are smaller than a rounding step."""
    weight = parameter(name, dtype=nominal)
    for made in (
        weight.detach().clone().to(torch.float32),
        weight.to("cpu", torch.float32),
        weight.to(dtype=torch.float32, copy=True),
        weight.to(torch.ones(1)),
        weight.type(torch.float32) if nominal != torch.float32 else weight.float(),
    ):
        assert type(made) is torch.Tensor and made.dtype == torch.float32
        assert torch.equal(made, weight.dequantize(dtype=torch.float32))
    assert weight.double().dtype == torch.float64 and type(weight.double()) is torch.Tensor
    master = weight.detach().clone().to(torch.float32)
    before = master.clone()
    for _ in range(100):
        master.add_(1e-5)
    assert torch.allclose(master - before, torch.tensor(1e-3), rtol=1e-2)
    (grad,) = torch.autograd.grad(weight.to(torch.float32).sum(), weight)
    assert torch.equal(grad, torch.ones(33, 50, dtype=nominal))
    compiled = torch.compile(lambda w: w.to(torch.float16), fullgraph=True, backend="aot_eager")
    assert type(compiled(weight)) is torch.Tensor


@one_of_each
def test_make_like(name: str) -> None:
    tensor = quantize(ONE_OF_EACH[name], normal((32, 48), BF16))
    cls = type(tensor)
    same = cls.make_like(tensor)
    assert same is not tensor and not same.requires_grad
    assert list(map(id, buffers(same).values())) == list(map(id, buffers(tensor).values()))
    other = cls.make_like(tensor, dtype=torch.float32, requires_grad=True)
    assert other.dtype == torch.float32 and other.requires_grad
    if name != "nvfp4":
        assert tuple(cls.make_like(tensor, shape=[16, 96]).shape) == (16, 96)


@each_quantizer
def test_dequantize_is_differentiable(name: str) -> None:
    weight, factor = parameter(name), normal((33, 50), torch.float32)
    for values in (
        weight.dequantize(),
        weight.float(),
        weight.half(),
        weight.dequantize(dtype=BF16),
    ):
        (grad,) = torch.autograd.grad((values * factor.to(values.dtype)).sum(), weight)
        assert type(grad) is torch.Tensor and grad.dtype == BF16
        assert torch.equal(grad, factor.to(values.dtype).to(BF16))
    with torch.no_grad():
        assert not weight.dequantize().requires_grad
    assert not weight.detach().dequantize().requires_grad


@each_quantizer
def test_operators_see_the_value_and_gradients_reach_the_parameter(name: str) -> None:
    weight, x = parameter(name), normal((7, 50), BF16).requires_grad_(True)
    plain = weight.detach().dequantize().requires_grad_(True)
    for function in (
        lambda w: x @ w.t(),
        lambda w: nn.functional.linear(x, w),
        lambda w: (w * 2 + 1)[:7],
        lambda w: torch.stack([w, w]).sum(0).view(-1),
        lambda w: w.clone() - 1,
    ):
        ours, theirs = function(weight), function(plain)
        assert type(ours) is torch.Tensor and torch.equal(ours, theirs)
        (a,), (b,) = (
            torch.autograd.grad(y.float().square().sum(), w) for y, w in ((ours, weight), (theirs, plain))
        )
        assert type(a) is torch.Tensor and torch.equal(a, b)


@each_quantizer
def test_assigning_data(name: str) -> None:
    weight, value = parameter(name), 3 * normal((33, 50), BF16, seed=1)
    source = quantize(WITH_DELAYED[name], value)
    weight.data = source
    assert_same_buffers(weight, source)
    torch.manual_seed(3)
    weight.data = value * 2
    assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert_same_buffers(weight, quantize(WITH_DELAYED[name], value * 2))
    weight.data = torch.ones(5, 16, dtype=torch.float16)
    assert tuple(weight.shape) == (5, 16) and weight.dtype == torch.float16
    assert torch.allclose(weight.detach().float(), torch.ones(5, 16), rtol=0.07)


def test_assigning_data_of_another_format() -> None:
    weight = parameter("current")
    with pytest.raises(ValueError, match="cannot make a Float8Tensor hold the data of an MXFP8Tensor"):
        weight.data = quantize(ONE_OF_EACH["mxfp8"], torch.ones(33, 50))


@one_of_each
def test_modules_move_and_cast_their_quantized_parameters(name: str) -> None:
    module: Any = nn.Module()
    module.weight = parameter(name)
    value = module.weight.detach().float()
    module.weight.marker = "kept"
    for change, dtype in (
        (lambda: module.to(torch.float16), torch.float16),
        (lambda: module.float(), torch.float32),
    ):
        change()
        codes = {key: buffer.clone() for key, buffer in buffers(module.weight).items()}
        assert isinstance(module.weight, nn.Parameter) and isinstance(module.weight, nc.QuantizedTensor)
        assert module.weight.dtype == module.weight.dequantize().dtype == dtype
        assert all(torch.equal(buffer, codes[key]) for key, buffer in buffers(module.weight).items())
        assert torch.allclose(module.weight.detach().float(), value, rtol=0.1, atol=0.1)
    twin = copy.deepcopy(module)
    assert_same_buffers(twin.weight, module.weight)
    assert_own_memory(twin.weight, module.weight)


@one_of_each
def test_repr_names_the_class_shape_directions_and_quantizer(name: str) -> None:
    weight = parameter(name)
    text = repr(weight)
    for part in (
        type(weight).__name__,
        "(33, 50)",
        "torch.bfloat16",
        "rowwise",
        type(ONE_OF_EACH[name]).__name__,
    ):
        assert part in text
    assert str(weight) == text == f"{weight}"
    meta = repr(weight.detach().to("meta"))
    assert type(weight).__name__ in meta


@each_quantizer
def test_storage_of_shares_the_buffers(name: str) -> None:
    weight = parameter(name, (64, 96))
    storage = storage_of(weight)
    assert not isinstance(storage, torch.Tensor) and storage.dtype == BF16
    assert list(map(id, buffers(storage).values())) == list(map(id, buffers(weight).values()))
    assert torch.equal(storage.dequantize(), weight.detach().dequantize())


def test_high_precision_initial_value() -> None:
    with nc.quantized_model_init(
        recipe=nc.recipe.Float8CurrentScaling(), preserve_high_precision_init_val=True
    ):
        weight: Any = nc.Linear(16, 32, device="cpu").weight
    kept = weight.get_high_precision_init_val()
    assert type(kept) is torch.Tensor and kept.device.type == "cpu"
    assert_same_buffers(nc.Float8CurrentScalingQuantizer(E4M3).quantize(kept), weight)
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    assert parameter("current").get_high_precision_init_val() is None  # type: ignore[attr-defined]


@pytest.mark.gpu
@each_quantizer
def test_to_the_gpu_and_back(name: str) -> None:
    weight = parameter(name)
    there = weight.detach().cuda()
    assert type(there) is type(weight) and there.device.type == "cuda"
    assert all(b.is_cuda for b in buffers(there).values())
    assert_same_buffers(there.cpu(), weight)
    assert_same_buffers(there.to("cpu"), weight)
    assert torch.equal(there.dequantize().cpu(), weight.detach().dequantize())


def test_a_guard_s_copy_keeps_the_quantizer_that_has_state() -> None:
    context = delayed().quantize(torch.ones(2, 3)).__tensor_flatten__()[1]
    copied = copy.deepcopy(context)
    assert copied is not context and copied.keys() == context.keys()
    assert all(copied[name] is context[name] for name in context)


@each_quantizer
def test_a_flattening_repeats_what_the_last_one_told_until_that_changes(name: str) -> None:
    """Guards of compiled code flatten every weight at every call."""
    weight = parameter(name)
    names, told = weight.__tensor_flatten__()
    assert weight.__tensor_flatten__()[1] is told and copy.deepcopy(told) == told
    assert (told["quantizer"], told["fake_dtype"], told["requires_grad"]) == (weight._quantizer, BF16, True)
    weight.requires_grad_(False)
    frozen = weight.__tensor_flatten__()[1]
    assert frozen == {**told, "requires_grad": False} != told
    assert weight.to_dtype(torch.float16).__tensor_flatten__()[1]["fake_dtype"] is torch.float16
    weight._quantizer = weight._quantizer.replace(internal=True)
    assert weight.__tensor_flatten__()[1]["quantizer"] is weight._quantizer
    setattr(weight, names[0], None)
    assert weight.__tensor_flatten__()[0] == names[1:]
