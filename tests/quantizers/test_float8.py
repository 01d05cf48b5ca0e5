"""Per-tensor FP8: live state of delayed scaling, its slots, deprecated arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise, normal
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.functional import quantize
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.quantizers.float8 import _slot_of

from .catalog import E4M3, E5M2, USAGES, buffers, delayed

BF16 = torch.bfloat16


class Seen(TorchDispatchMode):
    """What reaches a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_delayed_scaling_uses_the_scale_it_was_given_and_raises_amax() -> None:
    quantizer = delayed(4.0)
    assert isinstance(quantizer, nc.Float8Quantizer)
    x = torch.tensor([[1.0, -3.0], [0.5, 200.0]])
    tensor = quantizer.quantize(x)
    assert tensor._scale_inv.item() == 0.25
    assert tensor.dequantize().tolist() == [[1.0, -3.0], [0.5, 112.0]]  # 200 saturates at 448 / 4
    assert quantizer.amax.item() == 200.0
    quantizer.quantize(torch.ones(2, 2))
    assert quantizer.amax.item() == 200.0
    quantizer.scale.fill_(1.0)
    assert quantizer.quantize(x).dequantize()[1, 1].item() == 192.0  # 200 is a tie: to even
    assert tensor._scale_inv.item() == 0.25


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_every_way_of_quantizing_records_amax(usage: tuple[bool, bool]) -> None:
    x = normal((32, 48), BF16)
    amax = x.float().abs().max()
    for run in (
        lambda q: q.quantize(x),
        lambda q: q.quantize(x.clone().requires_grad_(True)),
        lambda q: q.quantize(x, out=delayed().with_usage(*usage).quantize(torch.zeros_like(x))),
        lambda q: q.quantize(torch.zeros_like(x)).quantize_(x),
        lambda q: q.quantize(torch.zeros_like(x)).copy_(x),
        lambda q: q.calibrate(x),
    ):
        quantizer = delayed().with_usage(*usage)
        run(quantizer)
        assert quantizer.amax.item() == amax  # type: ignore[attr-defined]


def test_calibrating_overwrites_and_quantizing_accumulates() -> None:
    quantizer = delayed()
    quantizer.quantize(torch.full((2, 2), 5.0))
    quantizer.calibrate(torch.full((2, 2), 3.0))
    assert quantizer.amax.item() == 3.0


def test_a_skipped_update_records_no_amax() -> None:
    quantizer = delayed()
    out = quantizer.quantize(torch.ones(2, 2))
    quantizer.update_quantized(torch.full((2, 2), 7.0), out, noop_flag=torch.ones(1))
    assert quantizer.amax.item() == 1.0
    quantizer.update_quantized(torch.full((2, 2), 7.0), out, noop_flag=torch.zeros(1))
    assert quantizer.amax.item() == 7.0


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_slot_reads_and_writes_its_own_place(usage: tuple[bool, bool], dtype: nc.DType) -> None:
    slot = DelayedFloat8Quantizer(dtype, 1, rowwise=usage[0], columnwise=usage[1])
    scale, amax = torch.tensor([8.0, 2.0, 0.5]), torch.zeros(3)
    x = normal((33, 50), BF16)
    outputs = quantize(x, slot, None, scale, amax)
    live = nc.Float8Quantizer(
        torch.tensor([2.0]), torch.zeros(1), dtype, rowwise=usage[0], columnwise=usage[1]
    )
    for ours, (name, theirs) in zip(outputs, buffers(live.quantize(x)).items(), strict=True):
        assert_bitwise(ours, theirs, name)
    assert amax.tolist() == [0.0, live.amax.item(), 0.0]
    assert scale.tolist() == [8.0, 2.0, 0.5]


@pytest.mark.parametrize(
    "wrong", [torch.ones(1, dtype=BF16), torch.ones(1, dtype=torch.float64), 2.0], ids=str
)
def test_a_scale_and_an_amax_are_fp32_tensors(wrong: Any) -> None:
    """Of a scale in bf16, which ``torch.ones(1)`` may be, the inverse would be rounded."""
    good = torch.ones(1, dtype=torch.float32)
    for name, given in (("scale", (wrong, good)), ("amax", (good, wrong))):
        with pytest.raises(
            TypeError, match=f"^{name} is (2.0, of|a tensor of torch).*; pass an fp32 tensor of shape"
        ):
            nc.Float8Quantizer(*given, E4M3)


def test_a_slot_of_a_state_that_begins_inside_its_memory() -> None:
    x = torch.full((2, 2), 3.0)
    for mode in (contextlib.nullcontext(), Seen()):
        scale, amax = torch.tensor([9.0, 8.0, 2.0])[1:], torch.zeros(4)[2:]
        with mode:
            outputs = quantize(x, DelayedFloat8Quantizer(E4M3, 1, columnwise=False), None, scale, amax)
        assert outputs[1].item() == 0.5
        assert amax.tolist() == [0.0, 3.0]


def test_a_mode_sees_each_view_of_a_state() -> None:
    with Seen() as seen:
        assert _slot_of(torch.arange(4.0), 2).item() == 2.0
    assert torch.ops.aten.as_strided.default in seen.operators


def test_a_slot_alone_cannot_quantize() -> None:
    with pytest.raises(RuntimeError, match="needs its state; use Float8Quantizer"):
        DelayedFloat8Quantizer(E4M3, 0).quantize(torch.ones(2, 2))


def test_ignored_arguments_warn() -> None:
    with pytest.warns(DeprecationWarning, match="use_existing_amax, amax no longer have an effect"):
        quantizer = nc.Float8CurrentScalingQuantizer(E4M3, use_existing_amax=True, amax=torch.ones(1))
    assert quantizer == nc.Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"))


def test_column_wise_only_decodes_to_the_same_values() -> None:
    x = normal((2, 3, 50), BF16)
    quantizer = nc.Float8CurrentScalingQuantizer(E4M3)
    both, columnwise = quantizer.quantize(x), quantizer.with_usage(rowwise=False).quantize(x)
    assert columnwise._data is None
    assert torch.equal(both.dequantize(), columnwise.dequantize())
    assert torch.equal(both._transpose, both._data.movedim(-1, 0))


def test_what_delayed_scaling_quantized_is_not_written_in_place() -> None:
    """Its scale is in the state of the operation, which may have moved on."""
    quantize = nc.set_recipe(nc.ops.Sequential(nc.ops.Quantize(True, False, device="cpu")), "delayed")
    y = quantize(torch.randn(8, 32))
    assert isinstance(y, nc.QuantizedTensor)
    with pytest.raises(RuntimeError, match=r"\(8, 32\).*cannot be written in place.*dequantize\(\) first"):
        y.relu_()
    assert y.relu().min() == 0
