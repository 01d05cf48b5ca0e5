"""Sums in a fixed order: the order itself, what padding may change, and one NaN for all."""

import math

import pytest
import torch
from torch import Tensor

from narrowcast.reference import reduction

from .checks import DTYPES, assert_bitwise, normal


def tree(values: list[Tensor]) -> Tensor:
    """Pairs of neighbours, by recursion on the halves."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize(
    "shape", [(3, 1), (2, 255), (2, 256), (3, 257), (1, 1000), (2, 3, 600), (0, 5), (4, 0)]
)
def test_row_sum_has_the_documented_order(shape: tuple[int, ...]) -> None:
    v = normal(shape, torch.float32, std=1e3)
    lanes = []
    for lane in range(256):
        total = torch.zeros(shape[:-1])
        for index in range(lane, shape[-1], 256):
            total = total + v[..., index]
        lanes.append(total)
    assert_bitwise(reduction.row_sum(v), tree(lanes))


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_column_sum_has_the_documented_order(rows: int) -> None:
    v = normal((rows, 5), torch.float32, std=1e3)
    padded = 128
    while padded < rows:
        padded *= 2
    assert_bitwise(reduction.column_sum(v), tree([*v, *[torch.zeros(5)] * (padded - rows)]))


def test_order_matters_to_these_inputs() -> None:
    v = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert reduction.row_sum(v) == 0.0
    assert v.double().sum() == 2.0


@pytest.mark.parametrize("group", [16, 32, 128])
def test_column_sum_of_partials_is_that_of_the_matrix(group: int) -> None:
    v = normal((419, 7), torch.float32, std=1e3)
    v[:, 3] = -0.0
    padded = torch.cat((v, torch.zeros(-419 % group, 7)))
    partials = torch.stack([tree(list(part)) for part in padded.split(group)])
    assert_bitwise(reduction.column_sum(partials), reduction.column_sum(v))


def test_zero_sums_are_positive_and_empty_sums_zero() -> None:
    for rows in (0, 1, 128, 256):
        assert_bitwise(reduction.column_sum(torch.full((rows, 3), -0.0)), torch.zeros(3))
    assert_bitwise(reduction.row_sum(torch.full((3, 512), -0.0)), torch.zeros(3))


def test_column_sum_gives_the_canonical_nan() -> None:
    v = torch.tensor([[-math.nan, math.inf], [1.0, -math.inf]])
    assert reduction.column_sum(v).view(torch.int32).tolist() == [0x7FFFFFFF] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_dtype(dtype: torch.dtype) -> None:
    v = torch.cat(
        (normal((4000,), torch.float32, std=1e3), torch.tensor([0.0, -0.0, math.inf, 3e38, 1e-7, 65519.0]))
    )
    assert_bitwise(reduction.round_to_dtype(v, dtype), v.to(dtype))
    nan = reduction.round_to_dtype(torch.full((40,), -math.nan), dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert (nan.view(integer) == torch.iinfo(integer).max).all()


def test_rank_sum_goes_through_the_ranks_in_order_and_divides_once() -> None:
    rows = torch.tensor([[1e4, 3.0], [0.0625, 3.0], [-1e4, 3.0]]).half()  # in fp32, from zero
    for rank in range(3):
        out = torch.full((2,), float("nan"))
        others = torch.cat([rows[:rank], rows[rank + 1 :]])
        reduction.rank_sum(rows[rank], others, rank, 4, out)
        assert out.tolist() == [0.0625 / 4, 2.25]
    out = torch.empty(2, dtype=torch.bfloat16)
    reduction.rank_sum(rows[0], rows[1:], 0, 4, out)
    assert out.tolist() == [0.0625 / 4, 2.25]
    large = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]]).bfloat16()
    for rank, others in ((0, large[1:]), (1, large[[0, 2]])):
        out = torch.empty(1)
        reduction.rank_sum(large[rank], others, rank, 1, out)
        assert out.item() == 0.0  # the 1 is lost, as it comes second
