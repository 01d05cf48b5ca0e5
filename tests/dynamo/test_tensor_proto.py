"""Tensor prototypes: what they describe is what a quantizer makes, eager, under a fake mode, and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from quantizers.catalog import (
    E4M3,
    ONE_OF_EACH,
    USAGES,
    VARIANTS,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import normal
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast._device import default_device
from narrowcast.dynamo import TensorProto, to_tensor_proto
from narrowcast.functional import quantize as quantize_operator
from narrowcast.tensors import QuantizedTensorStorage

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
SHAPES = [(64, 96), (33, 50), (2, 3, 50)]
each_quantizer = pytest.mark.parametrize("name", WITH_DELAYED)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)
each_usage = pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
each_kind = pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])


def proto(
    name: str, usage: tuple[bool, bool], internal: bool, shape: tuple[int, ...] = (33, 50)
) -> TensorProto:
    quantizer = WITH_DELAYED[name].with_usage(*usage).replace(internal=internal)
    return TensorProto(shape, BF16, quantizer, device="cpu")


def usages(described: TensorProto) -> dict[str, bool]:
    assert described.quantizer is not None
    return described.quantizer.get_usages()


def facts(tensor: Any) -> list[tuple]:
    """Everything about a tensor but its data."""
    described: list[tuple] = [(type(tensor), tuple(tensor.shape), tensor.dtype, torch.device(tensor.device))]
    if isinstance(tensor, torch.Tensor):
        described.append((tensor.stride(), tensor.requires_grad, tensor.is_leaf))
    if isinstance(tensor, QuantizedTensorStorage):
        described.append((tensor.get_usages(), tensor.__tensor_flatten__()))
        described.extend((k, tuple(b.shape), b.dtype, b.stride()) for k, b in buffers(tensor).items())
    return described


def test_defaults() -> None:
    plain = TensorProto([3, 4], torch.float16)  # type: ignore[arg-type]
    assert (plain.shape, plain.dtype, plain.quantizer, plain.requires_grad, plain.device) == (
        (3, 4),
        torch.float16,
        None,
        False,
        None,
    )
    assert not plain.is_quantized
    assert plain.create_tensor().device == default_device()
    quantized = TensorProto((3, 4), BF16, ONE_OF_EACH["current"], requires_grad=True)
    assert quantized.is_quantized and quantized.create_tensor().device == default_device()
    assert "(3, 4)" in repr(plain) and "Float8CurrentScalingQuantizer" in repr(quantized)
    assert plain == TensorProto((3, 4), torch.float16) != quantized
    assert plain != 5


def test_is_a_dataclass_with_a_hash() -> None:
    quantizer = ONE_OF_EACH["mxfp8"]
    one = TensorProto((3, 4), BF16, quantizer, device="cpu")
    names = [field.name for field in dataclasses.fields(one)]
    assert names == ["shape", "dtype", "quantizer", "requires_grad", "device"]
    two = TensorProto([3, 4], BF16, quantizer.copy(), device=torch.device("cpu"))  # type: ignore[arg-type]
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    for change in ({"shape": (4, 3)}, {"dtype": torch.float16}, {"quantizer": None}, {"requires_grad": True}):
        other = dataclasses.replace(one, **change)
        assert other != one and hash(other) != hash(one)
    one.update_usage(rowwise_usage=False)
    assert one != two and hash(one) != hash(two)


@pytest.mark.covering
@each_kind
@each_usage
@one_of_each
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="before torch 2.13 methods of a quantizer may not trace"
)
def test_existing_tensors_are_described_in_a_graph(
    name: str, usage: tuple[bool, bool], internal: bool
) -> None:
    """As inputs, and made there, as wrappers and as bare storages."""
    quantizer = ONE_OF_EACH[name].with_usage(*usage).replace(internal=internal)
    x = normal((32, 64), BF16)

    def run(x: torch.Tensor, given: Any) -> tuple[TensorProto, TensorProto]:
        return to_tensor_proto(quantizer.quantize(x)), to_tensor_proto(given)

    given = quantizer.replace(internal=False).quantize(x)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x, given)
    assert found == (to_tensor_proto(quantizer.quantize(x)), to_tensor_proto(given))


def test_plain_tensors() -> None:
    for requires_grad in (False, True):
        plain = TensorProto((3, 4), torch.float32, requires_grad=requires_grad, device="cpu")
        assert plain.inner_names() == ("data",)
        assert plain.create_metadata() == {
            "is_quantized": False,
            "dtype": torch.float32,
            "requires_grad": requires_grad,
        }
        made = plain.create_tensor()
        assert facts(made) == facts(torch.empty(3, 4, dtype=torch.float32, requires_grad=requires_grad))
        given = torch.ones(3, 4)
        assert plain.assemble([given]) is given and given.requires_grad is requires_grad
        assert to_tensor_proto(made) == plain
    with pytest.raises(ValueError, match="plain tensor has no row-wise or column-wise"):
        plain.update_usage(rowwise_usage=True)


@each_kind
@each_usage
@each_quantizer
def test_a_prototype_equals_the_real_tensor(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    for shape in SHAPES:
        described = proto(name, usage, internal, shape)
        quantizer: Any = described.quantizer
        real = quantize(quantizer, normal(shape, BF16))
        names, context = real.__tensor_flatten__()
        assert described.inner_names() == tuple(names)
        assert described.create_metadata() == context == quantizer.create_metadata(shape, dtype=BF16)
        inner = described.create_inner_tensors()
        assert [(tuple(t.shape), t.dtype, t.stride()) for t in inner] == [
            (tuple(t.shape), t.dtype, t.stride()) for t in buffers(real).values()
        ]
        made = described.create_tensor()
        assert facts(made) == facts(real)
        assert facts(made) == facts(quantizer.make_empty(shape, dtype=BF16, device="cpu"))


@each_kind
@each_usage
@each_quantizer
def test_round_trip(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    for shape in SHAPES:
        described = proto(name, usage, internal, shape)
        again = to_tensor_proto(described.create_tensor())
        real = to_tensor_proto(quantize(described.quantizer, normal(shape, BF16)))
        for other in (again, real):
            assert other.shape == shape and other.dtype == BF16 and not other.requires_grad
            assert str(other.device) == "cpu"
            assert other.inner_names() == described.inner_names()
            if name != "delayed":
                assert other == TensorProto(shape, BF16, described.quantizer, device=torch.device("cpu"))


@each_kind
@each_usage
@each_quantizer
def test_assemble_rebuilds_around_given_buffers(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    described = proto(name, usage, internal)
    real = quantize(described.quantizer, normal((33, 50), BF16))
    inner = [getattr(real, attribute) for attribute in real.__tensor_flatten__()[0]]
    again = described.assemble(inner)
    assert facts(again) == facts(real)
    assert all(a is b for a, b in zip(buffers(again).values(), inner, strict=True))
    assert torch.equal(again.dequantize(), real.dequantize())
    with pytest.raises(ValueError, match=rf"expected {len(inner)} buffers .*, got {len(inner) + 1}"):
        described.assemble([*inner, torch.empty(1)])
    with pytest.raises(ValueError, match="got 0"):
        described.assemble([])


def test_bare_storages_report_their_nominal_dtype() -> None:
    storage = nc.MXFP8Quantizer(E4M3).replace(internal=True).quantize(torch.ones(32, 32), dtype=torch.float16)
    assert to_tensor_proto(storage).dtype == torch.float16
    quantizer = to_tensor_proto(storage).quantizer
    assert quantizer is not None and quantizer.internal


@one_of_each
def test_a_view_of_one_direction_describes_that_direction(name: str) -> None:
    tensor = ONE_OF_EACH[name].quantize(normal((32, 48), BF16))
    for view in (tensor._view_of(tensor._ROWWISE_BUFFERS), tensor._view_of(tensor._COLUMNWISE_BUFFERS)):
        described = to_tensor_proto(view)
        assert described.inner_names() == tuple(buffers(view))
        assert [tuple(t.shape) for t in described.create_inner_tensors()] == [
            tuple(b.shape) for b in buffers(view).values()
        ]


@one_of_each
def test_gradients(name: str) -> None:
    described = TensorProto((32, 48), BF16, ONE_OF_EACH[name], requires_grad=True, device="cpu")
    made: Any = described.create_tensor()
    assert made.requires_grad and made.is_leaf
    assert described.create_metadata()["requires_grad"]
    assert to_tensor_proto(made) == TensorProto((32, 48), BF16, ONE_OF_EACH[name], True, torch.device("cpu"))


@one_of_each
def test_usage_is_changed_on_a_copy(name: str) -> None:
    shared = ONE_OF_EACH[name]
    described = TensorProto((32, 48), BF16, shared, device="cpu")
    assert described.quantizer is not shared and described.quantizer == shared
    described.update_usage(columnwise_usage=False)
    described.update_usage()
    assert shared.get_usages() == {"rowwise": True, "columnwise": True}
    assert usages(described) == {"rowwise": True, "columnwise": False}
    tensor = shared.quantize(normal((32, 48), BF16))
    tensor.update_usage(columnwise_usage=False)
    assert facts(described.create_tensor()) == facts(tensor)
    described.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert usages(described) == {"rowwise": False, "columnwise": True}


class Extra(nc.MXFP8Quantizer):
    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict:
        return {**super()._describe_buffers(shape, dtype), "_extra": ((1,), torch.float32)}


class Unordered(nc.MXFP8Quantizer):
    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict:
        return dict(reversed(super()._describe_buffers(shape, dtype).items()))


@pytest.mark.parametrize(
    ("cls", "named"), [(Extra, "_extra"), (Unordered, "_columnwise_scale_inv', '_columnwise_data'")]
)
def test_a_description_that_the_storage_does_not_declare(cls: type[nc.Quantizer], named: str) -> None:
    described = TensorProto((32, 32), BF16, cls(E4M3), device="cpu")  # type: ignore[call-arg]
    for use in (described.inner_names, described.create_tensor):
        with pytest.raises(RuntimeError, match=rf"{named}.*MXFP8Tensor declares .*_rowwise_data"):
            use()


@pytest.mark.covering
@each_kind
@each_usage
@one_of_each
def test_fake_tensors(name: str, usage: tuple[bool, bool], internal: bool) -> None:
    described = proto(name, usage, internal)
    real = described.create_tensor()
    with FakeTensorMode() as mode:
        inner = described.create_inner_tensors()
        made = described.create_tensor()
        assert all(
            isinstance(t, FakeTensor) and t.fake_mode is mode for t in (*inner, *buffers(made).values())
        )
        assert facts(made)[0] == facts(real)[0]
        if not internal:
            values = made.dequantize()
            assert values.shape == (33, 50) and values.dtype == BF16
        quantizer: Any = described.quantizer
        again = quantizer.quantize(torch.empty(33, 50, dtype=BF16))
        assert facts(again) == facts(made)


@each_kind
@one_of_each
def test_created_in_a_graph(name: str, internal: bool) -> None:
    quantizers = [proto(name, usage, internal).quantizer for usage in USAGES.values()]

    def create(x: torch.Tensor) -> Any:
        made: list[Any] = [TensorProto(x.shape, x.dtype, q, device="cpu").create_tensor() for q in quantizers]
        # a bare storage is no graph output, its buffers are
        return x + 1, [[b for b in t.get_data_tensors() if b is not None] if internal else t for t in made]

    x = torch.ones(2, 3, 50, dtype=BF16)
    made, expected = (
        torch.compile(create, fullgraph=True, backend="aot_eager", dynamic=False)(x)[1],
        create(x)[1],
    )
    for ours, theirs in zip(made, expected, strict=True):
        if internal:
            assert [(b.shape, b.dtype, b.stride()) for b in ours] == [
                (b.shape, b.dtype, b.stride()) for b in theirs
            ]
        else:
            assert facts(ours) == facts(theirs)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="before torch 2.13 a graph reads a quantizer's description only with constant sizes",
)
@one_of_each
def test_created_in_a_graph_with_dynamic_shapes(name: str) -> None:
    quantizers = [ONE_OF_EACH[name].with_usage(*usage) for usage in USAGES.values()]
    frames: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        frames.append(1)
        return graph.forward

    def create(x: torch.Tensor) -> Any:
        return [TensorProto(x.shape, x.dtype, q, device="cpu").create_tensor() for q in quantizers]

    function = torch.compile(create, fullgraph=True, backend=backend, dynamic=True)
    for rows in (33, 20, 130):
        x = torch.ones(rows, 50, dtype=BF16)
        assert list(map(facts, function(x))) == list(map(facts, create(x)))
    assert len(frames) == 1


@one_of_each
def test_filled_and_taken_apart_in_one_graph(name: str) -> None:
    """A prototype is a layout: buffers made by an operator become the tensor it describes."""
    described, x = TensorProto((33, 50), BF16, ONE_OF_EACH[name], device="cpu"), normal((33, 50), BF16)
    eager = described.assemble(list(quantize_operator(x, described.quantizer)))
    quantizer = described.quantizer

    def run(x: torch.Tensor) -> Any:
        inside = TensorProto((33, 50), BF16, quantizer, device="cpu")
        return inside.assemble(list(quantize_operator(x, quantizer)))

    assert_same_buffers(torch.compile(run, fullgraph=True, backend="aot_eager")(x), eager)
    assert_same_buffers(eager, ONE_OF_EACH[name].quantize(x))
