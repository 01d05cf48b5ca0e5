"""Padding and unpadding of grouped rows: sizes, values, gradients, tracing, refusals."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh
from torch import Tensor

from narrowcast import functional
from narrowcast.formats import round_up

SPLITS = [[5], [0], [], [3, 0, 17, 16, 1], [0, 0, 40], [32, 32]]
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2)


def values(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (rows, columns * size), dtype=torch.uint8).view(dtype)


def padded_by_hand(x: Tensor, splits: list[int], alignment: int, rows: int) -> Tensor:
    out = torch.zeros(rows, x.shape[1] * x.element_size(), dtype=torch.uint8)
    source = target = 0
    for split in splits:
        out[target : target + split] = x[source : source + split].contiguous().view(torch.uint8)
        source, target = source + split, target + round_up(split, alignment)
    return out.view(x.dtype)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pads_and_unpads(splits: list[int], dtype: torch.dtype) -> None:
    total = sum(splits)
    for alignment, columns in ((16, 8), (3, 1), (1, 5)):
        x = values(total, columns, dtype)
        exact = [round_up(split, alignment) for split in splits]
        bound = round_up(total + len(splits) * (alignment - 1), alignment)
        for given, rows in ((splits, sum(exact)), (torch.tensor(splits, dtype=torch.int32), bound)):
            padded, padded_splits, ends = functional.pad_rows(x, given, alignment)
            assert_fresh([padded], [x])
            assert_bitwise(padded, padded_by_hand(x, splits, alignment, rows))
            assert padded_splits.tolist() == exact and ends.dtype == torch.int32
            assert ends.tolist() == torch.tensor(exact).cumsum(0).tolist()
            back = functional.unpad_rows(padded, given, alignment, total)
            assert_fresh([back], [padded])
            assert_bitwise(back, x)


def test_fakes_tell_the_truth() -> None:
    for columns in (8, 0):
        x, splits = torch.randn(20, columns), torch.tensor([7, 0, 13])
        for given in (x, torch.randn(columns, 20).t()):
            torch.library.opcheck(torch.ops.narrowcast.pad_rows.default, (given, splits, 8, 40))
        torch.library.opcheck(
            torch.ops.narrowcast.unpad_rows.default, (torch.randn(40, columns), splits, 8, 20)
        )


def test_gradients_are_each_others() -> None:
    splits = torch.tensor([3, 0, 2])
    x = torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.narrowcast.pad_rows.default, (x, splits, 4, 12))
    padded = functional.pad_rows(x, splits, 4)[0]
    weight = torch.randn_like(padded)
    (grad,) = torch.autograd.grad((padded * weight).sum(), x)
    assert_bitwise(grad, functional.unpad_rows(weight, splits, 4, 5))
    y = torch.randn(8, 4, requires_grad=True)
    rows = functional.unpad_rows(y, [3, 0, 2], 4, 5)
    weight = torch.randn_like(rows)
    (grad,) = torch.autograd.grad((rows * weight).sum(), y)
    assert_bitwise(grad, functional.pad_rows(weight, [3, 0, 2], 4)[0])


def test_traced_with_gradients() -> None:
    def roundtrip(x: Tensor, splits: Tensor) -> Tensor:
        padded, padded_splits, _ = functional.pad_rows(x, splits, 8)
        return functional.unpad_rows(padded * 2.0, splits, 8, x.shape[0]) + padded_splits.sum()

    compiled = torch.compile(roundtrip, fullgraph=True, dynamic=True, backend="aot_eager")
    for splits in (torch.tensor([3, 4, 0]), torch.tensor([1, 16])):
        x = torch.randn(int(splits.sum()), 4, requires_grad=True)
        grads = [torch.autograd.grad(run(x, splits).square().sum(), x)[0] for run in (compiled, roundtrip)]
        assert_bitwise(compiled(x, splits), roundtrip(x, splits))
        assert_bitwise(*grads)


def test_traced_with_a_list() -> None:
    compiled = torch.compile(
        lambda x: functional.pad_rows(x, [2, 0, 3], 4)[0], fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(5, 3)
    assert_bitwise(compiled(x), padded_by_hand(x, [2, 0, 3], 4, 8))


def test_refuses() -> None:
    x, splits = torch.randn(4, 4), torch.tensor([4])
    for arguments, message in (
        ((x[0], splits, 8), r"x has shape \(4,\)"),
        ((x.double(), splits, 8), "x is torch.float64; use a dtype of 1, 2 or 4 bytes"),
        ((x, splits, 0), "alignment is 0; use 1 or more"),
        ((x, splits.float(), 8), "splits is torch.float32"),
        ((x, splits.view(1, 1), 8), r"shape \(1, 1\); use torch.int32 or torch.int64"),
        ((x, splits.to("meta"), 8), "splits is on meta, x on cpu"),
        ((x, [3], 8), r"splits is \[3\]; use non-negative numbers whose sum is the 4 rows"),
        ((x, [5, -1], 8), r"splits is \[5, -1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.pad_rows(*arguments)
    with pytest.raises(ValueError, match="whose sum is the 5 rows"):
        functional.unpad_rows(x, [4], 8, 5)
