"""Handles: the facts they carry are the quantizer's, and quantizing through one equals quantizing."""

from __future__ import annotations

import pytest
import torch
from reference.checks import normal

import narrowcast as nc
from narrowcast.quantizers import DelayedFloat8Quantizer, OperandHandles, handle_of, quantize_operand

from .catalog import E4M3, USAGES, VARIANTS, assert_same_buffers, delayed, quantize

BF16 = torch.bfloat16


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_operand_equals_the_bare_storage(name: str, usage: tuple[bool, bool]) -> None:
    quantizer, x = VARIANTS[name].with_usage(*usage), normal((33, 50), BF16)
    handle = handle_of(quantizer)
    torch.manual_seed(3)
    operand = quantize_operand(x, handle)
    assert_same_buffers(operand, quantize(quantizer, x))
    assert type(operand) is quantizer._storage_class
    assert operand._quantizer is quantizer and operand.dtype == BF16
    assert (handle.rowwise, handle.columnwise, handle.delayed) == (*usage, False)
    assert handle.stochastic is (name == "nvfp4 stochastic")


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_a_delayed_operand_uses_its_slot(usage: tuple[bool, bool]) -> None:
    x = normal((33, 50), BF16)
    handle = handle_of(DelayedFloat8Quantizer(E4M3, 1, rowwise=usage[0], columnwise=usage[1]))
    scale, history = torch.tensor([1.0, 2.0]), torch.zeros(3, 2)
    assert handle.delayed
    assert_same_buffers(
        quantize_operand(x, handle, scale, history), delayed(2.0).with_usage(*usage).quantize(x)
    )
    assert history[0].tolist() == [0.0, x.float().abs().max().item()]


def test_three_usages_of_one_quantizer() -> None:
    quantizer = nc.MXFP8Quantizer(E4M3, rowwise=False)
    handles = OperandHandles.of(quantizer)
    assert [(h.rowwise, h.columnwise) for h in (handles.both, handles.rowwise, handles.columnwise)] == [
        (True, True),
        (True, False),
        (False, True),
    ]
    assert handles == OperandHandles.of(nc.MXFP8Quantizer(E4M3))
    assert hash(handles) == hash(OperandHandles.of(nc.MXFP8Quantizer(E4M3)))
