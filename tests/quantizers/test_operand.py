"""Operands: the facts they carry are the quantizer's, and quantizing through one equals quantizing."""

from __future__ import annotations

import pytest
import torch
from reference.checks import normal

import narrowcast as nc
from narrowcast import functional
from narrowcast._tracing import slice_of
from narrowcast.quantizers import DelayedFloat8Quantizer, Operand, buffers_of

from .catalog import E4M3, USAGES, VARIANTS, assert_same_buffers, delayed, quantize

BF16 = torch.bfloat16


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_operand_equals_the_bare_storage(name: str, usage: tuple[bool, bool]) -> None:
    quantizer, x = VARIANTS[name].with_usage(*usage), normal((33, 50), BF16)
    operand = Operand.of(VARIANTS[name], *usage)
    assert operand.quantizer == quantizer
    assert (any(operand.rowwise), any(operand.columnwise), operand.unseen) == (*usage, None)
    assert operand.stochastic is (name == "nvfp4 stochastic")
    torch.manual_seed(3)
    expected = quantize(quantizer, x)
    torch.manual_seed(3)
    buffers = operand.quantize(x)
    assert buffers.quantizer is operand.quantizer
    for direction, present in zip(("rowwise", "columnwise"), usage):
        ours, theirs = getattr(buffers, direction), getattr(buffers_of(expected), direction)
        assert bool(ours) is present
        assert not ours or (len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)))
    torch.manual_seed(3)
    storage = operand.assemble(functional.quantize(x, operand.quantizer, operand.seed(x)), BF16)
    assert_same_buffers(storage, expected)
    assert type(storage) is quantizer._storage_class
    assert storage._quantizer is operand.quantizer and storage.dtype == BF16


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_a_delayed_operand_uses_its_slot(usage: tuple[bool, bool]) -> None:
    x = normal((33, 50), BF16)
    operand = Operand.of(DelayedFloat8Quantizer(E4M3, 1), *usage)
    scale, amax = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert operand.unseen == 0.0
    ours, theirs = operand.quantize(x, scale, amax), buffers_of(delayed(2.0).with_usage(*usage).quantize(x))
    for a, b in ((ours.rowwise, theirs.rowwise), (ours.columnwise, theirs.columnwise)):
        assert len(a) == len(b) and all(map(torch.equal, a, b))
    assert (bool(ours.rowwise), bool(ours.columnwise)) == usage
    assert amax.tolist() == [0.0, x.float().abs().max().item()]
    before = amax.clone()
    operand.quantize(8 * x, scale)  # without an amax nothing is collected
    assert torch.equal(amax, before)


def test_operands_are_values() -> None:
    ours, theirs = (Operand.of(nc.MXFP8Quantizer(E4M3, rowwise=rowwise)) for rowwise in (False, True))
    assert ours == theirs and hash(ours) == hash(theirs)
    assert (any(ours.rowwise), any(ours.columnwise)) == (True, True)
    assert ours != Operand.of(nc.MXFP8Quantizer(E4M3), columnwise=False)


def test_a_slice_takes_what_stands_at_equal_distances() -> None:
    buffers = list("abcdef")
    for places in ([], [2], [0, 1], [0, 2], [1, 2], [1, 3, 5]):
        taken = slice_of(places)
        assert taken is not None and buffers[taken] == [buffers[place] for place in places]
    assert slice_of([0, 1, 4]) is None
