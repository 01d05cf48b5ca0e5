"""Creating, dropping and refusing directions, format by format."""

from __future__ import annotations

import pytest
import torch
from quantizers.catalog import (
    ONE_OF_EACH,
    VARIANTS,
    assert_own_memory,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import EMPTY_SHAPES, RAGGED_SHAPES, normal

import narrowcast as nc

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
CREATES_COLUMNWISE = ["current", "current e5m2", "delayed", "block", "block fp32 scales", "nvfp4 2d"]
DIRECTED = [name for name in WITH_DELAYED if not name.startswith("identity")]
REFUSES_COLUMNWISE = [n for n in DIRECTED if n not in CREATES_COLUMNWISE and n != "nvfp4 4over6"]
each_kind = pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])


@each_kind
@pytest.mark.parametrize("name", CREATES_COLUMNWISE)
def test_column_wise_made_from_row_wise_equals_quantizing_it(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    for shape in ((64, 96), (130, 300), *RAGGED_SHAPES, *EMPTY_SHAPES):
        x = normal(shape, BF16)
        tensor = quantizer.with_usage(columnwise=False).quantize(x)
        rowwise = dict(buffers(tensor))
        tensor.update_usage(columnwise_usage=True)
        assert_same_buffers(tensor, quantizer.quantize(x))
        assert all(buffers(tensor)[key] is buffer for key, buffer in rowwise.items())
        assert_own_memory(tensor)
        assert tensor.get_usages() == tensor._quantizer.get_usages() == {"rowwise": True, "columnwise": True}


def test_a_4over6_tile_keeps_its_choice_when_transposed() -> None:
    """Quantizing both ways may choose differently per direction; a created direction repeats the tile's choice."""
    x = normal((33, 50), BF16)
    tensor = VARIANTS["nvfp4 4over6"].with_usage(columnwise=False).quantize(x)
    rowwise = tensor.dequantize()
    tensor.update_usage(columnwise_usage=True)
    tensor.update_usage(rowwise_usage=False)
    assert torch.equal(tensor.dequantize(), rowwise)


@each_kind
@pytest.mark.parametrize("name", REFUSES_COLUMNWISE)
def test_column_wise_that_cannot_be_made(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    tensor = quantize(quantizer.with_usage(columnwise=False), normal((64, 96), BF16))
    expected = dict(buffers(tensor))
    with pytest.raises(
        RuntimeError, match=rf"{type(tensor).__name__} cannot make column-wise data.*columnwise=True"
    ):
        tensor.update_usage(columnwise_usage=True)
    assert buffers(tensor) == expected
    assert tensor.get_usages() == tensor._quantizer.get_usages() == {"rowwise": True, "columnwise": False}


@each_kind
@pytest.mark.parametrize("name", DIRECTED)
def test_row_wise_cannot_be_made(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    tensor = quantize(quantizer.with_usage(rowwise=False), normal((64, 96), BF16))
    with pytest.raises(
        RuntimeError, match=rf"{type(tensor).__name__} cannot make row-wise data.*rowwise=True"
    ):
        tensor.update_usage(rowwise_usage=True)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}


@each_kind
@pytest.mark.parametrize("name", DIRECTED)
def test_dropping_a_direction(name: str, internal: bool) -> None:
    quantizer = WITH_DELAYED[name].replace(internal=internal)
    x = normal((33, 50), BF16)
    for keep, arguments in (
        ("rowwise", {"columnwise_usage": False}),
        ("columnwise", {"rowwise_usage": False}),
    ):
        tensor = quantize(quantizer, x)
        operand = getattr(tensor, f"{keep}_operand")()
        tensor.update_usage(**arguments)
        assert list(map(id, buffers(tensor).values())) == list(map(id, operand))
        assert tensor.get_usages() == tensor._quantizer.get_usages()
        assert tensor.__tensor_flatten__()[1]["quantizer"].get_usages() == tensor.get_usages()
        assert tuple(tensor.shape) == (33, 50) and tensor.dequantize().shape == (33, 50)
        with pytest.raises(RuntimeError, match=rf"{type(tensor).__name__} must keep at least one direction"):
            tensor.update_usage(rowwise_usage=False, columnwise_usage=False)
        assert buffers(tensor)


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_nothing_asked_nothing_done(name: str) -> None:
    tensor = quantize(WITH_DELAYED[name], normal((33, 50), BF16))
    before, quantizer = dict(buffers(tensor)), tensor._quantizer
    tensor.update_usage()
    tensor.update_usage(True, True)
    assert buffers(tensor) == before
    assert tensor._quantizer.get_usages() == quantizer.get_usages()


def test_the_one_buffer_of_identity_serves_both() -> None:
    x = normal((3, 5), BF16)
    for usage in ((True, False), (False, True)):
        tensor = ONE_OF_EACH["identity"].quantize(x)
        tensor.update_usage(*usage)
        assert torch.equal(tensor.dequantize(), x)
        assert tensor.rowwise_operand()[0] is tensor.columnwise_operand()[0]


def test_the_quantizer_of_another_tensor_does_not_change() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    one, two = quantizer.quantize(torch.ones(4, 4)), quantizer.quantize(torch.ones(4, 4))
    one.update_usage(columnwise_usage=False)
    assert quantizer.columnwise_usage and two._quantizer.columnwise_usage and two._transpose is not None
