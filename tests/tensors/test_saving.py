"""Saving for a backward: the live tensor is not touched, and what was saved can be restored again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from quantizers.catalog import ONE_OF_EACH, USAGES, VARIANTS, assert_same_buffers, buffers, delayed, quantize
from reference.checks import normal

import narrowcast as nc

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}


def mixed(usage: tuple[bool, bool], internal: bool, shape: tuple[int, ...]) -> list[Any]:
    """Plain tensors, None and one quantized tensor of every kind."""
    quantized = [
        quantize(q.with_usage(*usage).replace(internal=internal), normal(shape, BF16))
        for q in WITH_DELAYED.values()
    ]
    return [torch.ones(3), None, *quantized, None, torch.zeros(2)]


@pytest.mark.parametrize("shape", [(64, 96), (33, 50), (2, 3, 50)], ids=str)
@pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_saved_tensors_come_back_twice(
    usage: tuple[bool, bool], internal: bool, shape: tuple[int, ...]
) -> None:
    originals = mixed(usage, internal, shape)
    before = [None if not hasattr(t, "get_data_tensors") else t.get_data_tensors() for t in originals]
    flat, objects = nc.prepare_for_saving(*originals)
    assert all(tensor is None or type(tensor) is torch.Tensor for tensor in flat)
    assert not any(
        isinstance(saved, torch.Tensor) for o in objects if o is not None for saved in vars(o).values()
    )
    for original, kept in zip(originals, before, strict=True):
        if kept is not None:
            assert all(a is b for a, b in zip(original.get_data_tensors(), kept, strict=True))
    first, second = nc.restore_from_saved(objects, flat), nc.restore_from_saved(objects, tuple(flat))
    for original, one, two in zip(originals, first, second, strict=True):
        if original is None or type(original) is torch.Tensor:
            assert one is original and two is original
            continue
        assert one is not two and one is not original
        for restored in (one, two):
            assert_same_buffers(restored, original)
            assert tuple(restored.shape) == shape and restored.dtype == BF16
            assert restored._quantizer is original._quantizer
            assert torch.equal(restored.dequantize(), original.dequantize())


def test_the_rest_is_handed_back() -> None:
    tensor = ONE_OF_EACH["mxfp8"].quantize(torch.ones(32, 32))
    flat, objects = nc.prepare_for_saving(tensor)
    other = torch.ones(1)
    restored, rest = nc.restore_from_saved(objects, [*flat, other, None], return_saved_tensors=True)
    assert len(restored) == 1 and rest == [other, None]


def test_clearing_one_restoration_leaves_the_others() -> None:
    tensor = ONE_OF_EACH["nvfp4"].quantize(normal((33, 50), BF16))
    flat, objects = nc.prepare_for_saving(tensor)
    one, two = (nc.restore_from_saved(objects, flat)[0] for _ in range(2))
    one.clear()
    assert buffers(two) and buffers(tensor)
    assert torch.equal(two.dequantize(), tensor.dequantize())


def test_a_context_keeps_its_bookkeeping() -> None:
    tensor = ONE_OF_EACH["block"].quantize(normal((33, 50), BF16))
    flat, objects = nc.prepare_for_saving(tensor, None)
    context = SimpleNamespace(saved_tensors=tuple(flat), tensor_objects=objects)
    for _ in range(2):
        restored, nothing = nc.restore_from_func_ctx(context)
        assert_same_buffers(restored, tensor)
        assert nothing is None
    with pytest.raises(AttributeError, match="tensor_objects"):
        nc.restore_from_func_ctx(SimpleNamespace(saved_tensors=()))


class _Square(torch.autograd.Function):
    """x**2 whose backward reads a quantized x, saved buffer by buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: nc.Quantizer) -> torch.Tensor:
        flat, ctx.tensor_objects = nc.prepare_for_saving(quantizer.quantize(x.detach()))
        ctx.save_for_backward(*flat)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x: Any = nc.restore_from_func_ctx(ctx)[0]
        return 2 * grad * x.dequantize(), None


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_graph_is_walked_twice(name: str) -> None:
    x = normal((33, 50), BF16).requires_grad_(True)
    y = _Square.apply(x, ONE_OF_EACH[name]).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    assert torch.equal(first, 2 * ONE_OF_EACH[name].quantize(x.detach()).dequantize())


class _Releasing(torch.autograd.Function):
    """Notes in its backward whether the context still has what it saved."""

    noted: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        flat, ctx.tensor_objects = nc.prepare_for_saving(x.clone())
        ctx.save_for_backward(*flat)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = nc.restore_from_func_ctx(ctx)
        try:
            _Releasing.noted.append(len(ctx.saved_tensors) > 0)
        except RuntimeError:
            _Releasing.noted.append(False)
        return 2 * grad * x


def test_a_context_lets_go_of_what_it_gave_unless_the_graph_is_retained() -> None:
    x = torch.ones(3, requires_grad=True)
    _Releasing.noted.clear()
    y = _Releasing.apply(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert _Releasing.noted == [True, False]
    assert torch.equal(x.grad, torch.full((3,), 4.0))
