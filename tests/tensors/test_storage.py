"""Bare storages: flattening, rebuilding, the registry, views of one direction, copying bytes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from quantizers.catalog import (
    E5M2,
    ONE_OF_EACH,
    USAGES,
    VARIANTS,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import normal

import narrowcast as nc
from narrowcast.tensors import Float8TensorStorage, QuantizedTensor, QuantizedTensorStorage
from narrowcast.tensors.storage import STORAGE_CLASSES, resolve_storage_class, storage_identifier

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
each_quantizer = pytest.mark.parametrize("name", WITH_DELAYED)
each_usage = pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
each_kind = pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
SHAPES = [(64, 96), (33, 50), (2, 3, 50), (3, 1, 1, 17)]
CONCRETE = [type(quantizer)._tensor_class for quantizer in ONE_OF_EACH.values()]


def flatten(tensor: QuantizedTensorStorage) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def filled(quantizer: nc.Quantizer, shape: tuple[int, ...]) -> Any:
    """A tensor with a deterministic pattern in every buffer."""
    tensor = quantizer.make_empty(shape, dtype=BF16, device="cpu")
    for buffer in buffers(tensor).values():
        pattern = torch.arange(buffer.numel()).view(buffer.shape)
        buffer.copy_(pattern % 113 if buffer.dtype == torch.uint8 else 0.5 + pattern % 7)
    return tensor


@each_usage
@each_quantizer
@each_kind
def test_flatten_and_unflatten(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    quantizer = WITH_DELAYED[name].with_usage(*usage).replace(internal=internal)
    for shape in SHAPES:
        tensor = filled(quantizer, shape)
        inner, context = flatten(tensor)
        assert list(inner) == [n for n, _ in tensor._FLATTEN_TENSOR_BUFFERS if getattr(tensor, n) is not None]
        assert not any(isinstance(value, torch.Tensor) for value in context.values())
        stride = None if internal else tensor.stride()
        again = type(tensor).__tensor_unflatten__(inner, context, torch.Size(shape), stride)
        assert type(again) is type(tensor)
        assert flatten(again)[1] == context
        assert all(getattr(again, key) is buffer for key, buffer in inner.items())
        assert tuple(again.shape) == shape and again.dtype == BF16
        assert torch.equal(again.dequantize().nan_to_num(), tensor.dequantize().nan_to_num())


@each_usage
@each_quantizer
@each_kind
def test_metadata_rebuilds(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    quantizer = WITH_DELAYED[name].with_usage(*usage).replace(internal=internal)
    for shape in SHAPES:
        tensor = quantize(quantizer, normal(shape, BF16))
        again = type(tensor)(**tensor.get_metadata())
        assert again is not tensor
        assert again.__tensor_flatten__() == tensor.__tensor_flatten__()
        assert all(a is b for a, b in zip(again.get_data_tensors(), tensor.get_data_tensors(), strict=True))
        assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_size_dtype_and_device_of_a_bare_storage(name: str) -> None:
    storage = ONE_OF_EACH[name].replace(internal=True).quantize(normal((2, 3, 50), torch.float16))
    assert not isinstance(storage, torch.Tensor)
    assert storage.size() == storage.shape == torch.Size((2, 3, 50))
    assert storage.dtype == torch.float16
    assert storage.device == torch.device("cpu")
    assert storage.dequantize().dtype == torch.float16
    assert storage.dequantize(dtype=torch.float32).dtype == torch.float32
    text = repr(storage)
    assert type(storage).__name__ in text and "(2, 3, 50)" in text and "torch.float16" in text


def test_flatten_needs_every_declared_attribute() -> None:
    storage = ONE_OF_EACH["mxfp8"].replace(internal=True).quantize(torch.ones(32, 32))
    del storage._rowwise_scale_inv
    with pytest.raises(AttributeError, match="_rowwise_scale_inv"):
        storage.__tensor_flatten__()


def test_unflatten_refuses_what_it_does_not_know() -> None:
    tensor = ONE_OF_EACH["mxfp8"].quantize(torch.ones(32, 32))
    inner, context = flatten(tensor)
    with pytest.raises(KeyError, match="_data"):
        type(tensor).__tensor_unflatten__({**inner, "_data": torch.ones(1)}, context, None, None)
    with pytest.raises(KeyError, match=r"no\.such:Class.*known: .*narrowcast\.tensors\.named:MXFP8Tensor"):
        type(tensor).__tensor_unflatten__(inner, {**context, "class": "no.such:Class"}, None, None)
    with pytest.raises(
        TypeError, match=r"MXFP8TensorStorage got unknown buffers \['payload'\]; it takes \['rowwise_data'"
    ):
        nc.MXFP8TensorStorage(quantizer=tensor._quantizer, payload=torch.ones(1))
    with pytest.raises(ValueError, match="MXFP8Tensor needs at least one buffer"):
        nc.MXFP8Tensor(quantizer=tensor._quantizer)


def test_unflatten_gives_a_wrapper_the_outer_shape_and_stride() -> None:
    tensor = ONE_OF_EACH["mxfp8"].quantize(torch.ones(32, 64))
    inner, context = flatten(tensor)
    unflatten = type(tensor).__tensor_unflatten__
    for stride in ((64, 1), (1, 32)):
        made = unflatten(inner, context, (32, 64), stride)
        assert tuple(made.shape) == (32, 64) and made.stride() == stride and made.device == tensor.device
        assert torch.equal(made.dequantize(), tensor.dequantize())
    assert unflatten(inner, context, None, None).stride() == (64, 1)
    bare = ONE_OF_EACH["mxfp8"].replace(internal=True).quantize(torch.ones(32, 64))
    inner, context = flatten(bare)
    assert bare.__tensor_unflatten__(inner, context, (32, 64), (64, 1)).size() == bare.size()


def test_equal_class_names_in_two_modules_do_not_collide() -> None:
    made = []
    for module in ("narrowcast_test_one", "narrowcast_test_two"):

        def body(namespace: dict[str, Any], module: str = module) -> None:
            namespace.update(
                __module__=module, __qualname__="Twin", _FLATTEN_TENSOR_BUFFERS=((f"_{module}", module),)
            )

        made.append(types.new_class("Twin", (Float8TensorStorage,), {}, body))
    try:
        assert made[0].__name__ == made[1].__name__
        for cls in made:
            assert resolve_storage_class(storage_identifier(cls)) is cls
            storage = cls(quantizer=ONE_OF_EACH["current"], **{cls.__module__: torch.ones(2)})
            inner, context = flatten(storage)
            assert type(cls.__tensor_unflatten__(inner, context, None, None)) is cls
    finally:
        for cls in made:
            del STORAGE_CLASSES[storage_identifier(cls)]


@pytest.mark.parametrize("cls", CONCRETE)
def test_one_flatten_order_in_two_spellings(cls: type[QuantizedTensor]) -> None:
    for each in (cls, cls._bare_class()):
        assert each._INNER_TENSORS is each._FLATTEN_TENSOR_BUFFERS
        assert resolve_storage_class(storage_identifier(each)) is each
        declared = [name for name, _ in each._FLATTEN_TENSOR_BUFFERS]
        assert each.buffer_attributes(True, True) == declared
        assert set(each._ROWWISE_BUFFERS) | set(each._COLUMNWISE_BUFFERS) == set(declared)


@each_quantizer
@pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
def test_views_share_buffers_and_keep_one_direction(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    tensor = quantize(quantizer, normal((32, 48), BF16))
    for view, operand, side in (
        (tensor._view_of(tensor._ROWWISE_BUFFERS), tensor.rowwise_operand(), "rowwise"),
        (tensor._view_of(tensor._COLUMNWISE_BUFFERS), tensor.columnwise_operand(), "columnwise"),
    ):
        assert not isinstance(view, torch.Tensor) and type(view) is type(tensor)._bare_class()
        assert list(map(id, buffers(view).values())) == list(map(id, operand))
        expected = quantize(
            quantizer.with_usage(side == "rowwise", side == "columnwise"), normal((32, 48), BF16)
        )
        if name != "nvfp4 stochastic":
            assert torch.equal(view.dequantize(), expected.dequantize())
        described, dtype = view._description
        assert described.get_usages() == view.get_usages() and dtype == BF16
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert tensor._description == (quantizer, BF16) and tensor._description[0] is quantizer


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name != "identity"])
def test_a_direction_that_is_not_there(name: str) -> None:
    x = normal((32, 48), BF16)
    rowwise = ONE_OF_EACH[name].with_usage(columnwise=False).quantize(x)
    columnwise = ONE_OF_EACH[name].with_usage(rowwise=False).quantize(x)
    with pytest.raises(RuntimeError, match=rf"{type(rowwise).__name__} holds no column-wise data"):
        rowwise.columnwise_operand()
    with pytest.raises(RuntimeError, match=rf"{type(rowwise).__name__} holds no row-wise data"):
        columnwise.rowwise_operand()
    rowwise.clear()
    assert buffers(rowwise) == {} and set(rowwise.get_data_tensors()) == {None}
    with pytest.raises(RuntimeError, match="holds no"):
        rowwise.dequantize()


@each_quantizer
@pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
def test_copying_bytes(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    source, target = (
        quantize(quantizer, normal((33, 50), BF16)),
        quantize(quantizer, torch.ones(33, 50, dtype=BF16)),
    )
    pointers = [b.data_ptr() for b in buffers(target).values()]
    target.copy_from_storage(source)
    assert_same_buffers(target, source)
    assert pointers == [b.data_ptr() for b in buffers(target).values()]


def test_copying_bytes_that_would_mean_something_else() -> None:
    target = ONE_OF_EACH["current"].quantize(torch.ones(32, 32))
    before = target.dequantize()
    for source in (
        ONE_OF_EACH["mxfp8"].quantize(torch.zeros(32, 32)),
        ONE_OF_EACH["current"].quantize(torch.zeros(1, 32)),
        ONE_OF_EACH["current"].with_usage(columnwise=False).quantize(torch.zeros(32, 32)),
        nc.Float8CurrentScalingQuantizer(E5M2).quantize(torch.zeros(32, 32)),
    ):
        with pytest.raises(ValueError, match="the buffers differ"):
            target.copy_from_storage(source)
    assert torch.equal(target.dequantize(), before)


def test_a_class_may_declare_its_buffers_in_the_other_spelling() -> None:
    class Codes(QuantizedTensorStorage):
        _INNER_TENSORS = (("_codes", "codes"),)
        _ROWWISE_BUFFERS = ("_codes",)

    try:
        assert Codes._FLATTEN_TENSOR_BUFFERS is Codes._INNER_TENSORS == (("_codes", "codes"),)
        storage = Codes(quantizer=ONE_OF_EACH["current"], codes=torch.ones(2, 3))
        assert storage.size() == (2, 3)
        assert storage.__tensor_flatten__()[0] == ["_codes"] == Codes.buffer_attributes(True, False)
    finally:
        del STORAGE_CLASSES[storage_identifier(Codes)]


@each_quantizer
def test_writing_counts_as_a_version_of_every_buffer(name: str) -> None:
    """So that a backward finds out that what it saved of a weight holds other values now."""
    weight = torch.nn.Parameter(quantize(WITH_DELAYED[name], normal((64, 32), torch.float32)))
    other = quantize(WITH_DELAYED[name], torch.ones(64, 32))
    with torch.no_grad():
        for write in (
            lambda: weight.mul_(3.0),
            lambda: weight.copy_(other),
            lambda: weight.copy_(torch.zeros(64, 32)),
            lambda: weight.copy_from_storage(other),
            lambda: weight.quantize_(torch.ones(64, 32)),
        ):
            before = [buffer._version for buffer in buffers(weight).values()]
            write()
            assert all(
                buffer._version > v for buffer, v in zip(buffers(weight).values(), before, strict=True)
            )
