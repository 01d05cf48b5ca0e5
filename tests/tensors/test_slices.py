"""Slices and splits of quantized tensors, of either direction: the slice of the values, whatever its start and stop."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, VARIANTS, quantize
from reference.checks import normal
from torch import Tensor

import narrowcast as nc
from narrowcast.functional import dequantize
from narrowcast.tensors import storage_of

EDGES = (0, 1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 47, 64, 65, 128, 130, 160, -1, -16, None)
RANGES = sorted(
    {*itertools.product(EDGES[:-1], (17, 64, -1, None)), *itertools.product((0, 1, 16, 33), EDGES[1:])},
    key=str,
)
"""Every start with some stops, and every stop with some starts."""
SHAPES = [(33, 65), (64, 33), (130, 48)]


def values(tensor: Any, columnwise: bool) -> Tensor:
    storage, buffers = storage_of(tensor), tensor.columnwise_operand if columnwise else tensor.rowwise_operand
    shape = list(tensor.shape)
    return dequantize(buffers(), storage._quantizer, columnwise, torch.float32, shape)


def plain(part: Any, columnwise: bool) -> Tensor:
    return values(part, columnwise) if isinstance(part, nc.QuantizedTensor) else part.clone()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_slice_holds_the_slice_of_the_values(name: str, shape: tuple[int, int]) -> None:
    for columnwise in (False, True):
        quantizer = VARIANTS[name].with_usage(rowwise=not columnwise, columnwise=columnwise)
        tensor = quantize(quantizer, normal(shape, torch.float32))
        whole = tensor.dequantize()
        for dim, (first, last) in itertools.product((0, 1), RANGES):
            index = (slice(first, last), slice(None))[:: 1 - 2 * dim]
            part = tensor[index]
            decoded = part.dequantize() if isinstance(part, nc.QuantizedTensor) else part.clone()
            assert torch.equal(decoded, whole[index]), (columnwise, index)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_both_directions_hold_both(name: str, shape: tuple[int, int]) -> None:
    tensor = quantize(VARIANTS[name].with_usage(True, True), normal(shape, torch.float32))
    wholes = [values(tensor, columnwise) for columnwise in (False, True)]
    for dim, size in itertools.product((0, 1), (1, 16, 17, 32, 48, 128, 200)):
        for cut in (
            torch.split,
            lambda x, n, d: torch.split(x, [n] * (x.shape[d] // n) + [x.shape[d] % n], d),
        ):
            parts = cut(tensor, size, dim)
            for columnwise in (0, 1):
                if not all(isinstance(part, nc.QuantizedTensor) for part in parts):
                    columnwise = 0  # plain values: those of the rows
                for part, expected in zip(parts, cut(wholes[columnwise], size, dim), strict=True):
                    assert torch.equal(plain(part, bool(columnwise)), expected), (dim, size, columnwise)


def test_the_last_column_of_an_odd_slice() -> None:
    tensor = nc.NVFP4Quantizer().quantize(torch.randn(64, 33))
    assert torch.equal(tensor[:, 16:33].dequantize(), tensor.dequantize()[:, 16:33])


def test_a_slice_multiplies_as_the_slice_of_the_values() -> None:
    """What follows the end within a block is padding, which a GEMM reads, too."""
    for quantizer in (nc.NVFP4Quantizer(), nc.MXFP8Quantizer(E4M3)):
        weight, x = quantizer.quantize(torch.randn(64, 80)), torch.randn(8, 48)
        part = weight[:, 32:]
        assert isinstance(part, nc.QuantizedTensor) and part.shape == (64, 48)
        assert torch.equal(torch.nn.functional.linear(x, part), x @ weight.dequantize()[:, 32:].t())


def test_strides_of_a_later_part_count_from_its_own_start_or_are_refused() -> None:
    tensor = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(256, 32))
    for part, first in ((tensor[128:], 128), (tensor[128:].detach(), 128), (tensor.split(128)[1], 128)):
        with pytest.raises(RuntimeError, match="counts from the start of the whole tensor"):
            part.as_strided((32, 32), (32, 1), 0)
        expected = tensor.dequantize()[first : first + 32]
        assert torch.equal(part.as_strided((32, 32), (32, 1)).clone(), expected)
        for view in (part.flatten(), part.t(), part.unbind(1)[0], part[0], part.t()[:2]):
            with pytest.raises(RuntimeError, match="counts from the start of the whole tensor"):
                view.as_strided((2,), (1,), 0)
            assert torch.equal(view.as_strided((2,), (1,)).clone(), expected[0, :2])
    assert torch.equal(tensor[:128].as_strided((32, 32), (32, 1), 0).clone(), tensor.dequantize()[:32])
    assert torch.equal(tensor.as_strided((32, 32), (32, 1), 64 * 32).clone(), tensor.dequantize()[64:96])


def test_rows_behind_the_end_are_those_of_plain_tensors() -> None:
    tensor = nc.Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(32, 64))
    assert tensor.as_strided((0, 64), (64, 1), 33 * 64).shape == (0, 64)
    with pytest.raises(RuntimeError, match="out of bounds"):
        tensor.as_strided((4, 64), (64, 1), 30 * 64)


@pytest.mark.parametrize("weights_only", [True, False])
def test_copies_of_a_part_know_where_it_begins(weights_only: bool) -> None:
    """PyTorch's deep copies and files keep the whole memory, in which an offset counts."""
    tensor = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(256, 32))
    columns = nc.IdentityQuantizer().quantize(torch.randn(1, 2))
    for part in (tensor[128:], tensor[128:].flatten(), tensor[128:][3], columns[:, 1:]):
        for copied in (copy.deepcopy(part), saved(part, weights_only)):
            for same in (copied, copied.detach(), copy.deepcopy(copied), saved(copied, weights_only)):
                with pytest.raises(RuntimeError, match="counts from the start of the whole tensor"):
                    same.as_strided((1,), (1,), 0)
                assert torch.equal(same.clone(), part.clone())
    loaded = saved(tensor[128:], weights_only)
    assert not loaded.zero_().any() and tensor.dequantize()[128:].any()


def test_a_copied_row_counts_from_the_start_of_its_tensor() -> None:
    tensor = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(64, 32))
    for row in (copy.deepcopy(tensor[3]), saved(tensor[3], True)):
        assert type(row) is torch.Tensor and row.storage_offset() == 3 * 32
        assert torch.equal(row.as_strided((32,), (1,), 32), tensor.dequantize()[1])
    with pytest.raises(RuntimeError, match="graph leaves"):  # as a row of any tensor
        copy.deepcopy(torch.nn.Parameter(tensor)[3])


def test_a_graph_of_a_whole_tensor_does_not_take_a_part() -> None:
    """It wrote to the part, and counted from the part's start, in silence."""
    quantizer = nc.MXFP8Quantizer(E4M3)
    tensor, whole = quantizer.quantize(torch.randn(256, 32)), quantizer.quantize(torch.randn(128, 32))
    before = tensor.dequantize()
    written = torch.compile(lambda t: t.mul_(2) + 1, backend="aot_eager")
    counted = torch.compile(lambda t: t.as_strided((32, 32), (32, 1), 0) + 1, backend="aot_eager")
    for run, message in ((written, "through a view"), (counted, "counts from the start")):
        run(whole)
        for part in (tensor[128:], tensor[128:].to_dtype(torch.float32)):
            with pytest.raises(Exception, match=message):
                run(part)
    assert torch.equal(tensor.dequantize(), before)


def saved(value: torch.Tensor, weights_only: bool) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_a_view_of_a_part_refuses_writes_as_the_part_does() -> None:
    tensor = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(256, 32))
    part = tensor[:128]
    for view in (part, part.view(128, 32), part.detach(), part.as_strided((128, 32), (32, 1))):
        with pytest.raises(RuntimeError, match="through a view of a quantized tensor"):
            view.zero_()


def test_dims_count_from_the_end_and_nothing_is_no_part() -> None:
    tensor = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(64, 96))
    part = torch.ops.aten.slice.Tensor(tensor, -2, 32, 64)
    assert isinstance(part, nc.MXFP8Tensor) and torch.equal(part.dequantize(), tensor.dequantize()[32:])
    for columnwise in (False, True):
        one = tensor._quantizer.with_usage(not columnwise, columnwise).quantize(torch.randn(64, 96))
        empty = one[5:5]
        assert not isinstance(empty, nc.QuantizedTensor) and empty.shape == (0, 96)
