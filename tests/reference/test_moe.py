"""The way to the experts and back, against loops over tokens and rows."""

from __future__ import annotations

import torch

from narrowcast.reference import moe
from narrowcast.testing import assert_close

from .checks import assert_bitwise

ROW_MAP = torch.tensor([[0, -1, 3], [-1, -1, -1], [1, 2, -1]], dtype=torch.int32)
POSITIONS = torch.tensor(
    [0, 6, 7, 2, -1], dtype=torch.int32
)  # of five rows, of which the last belongs to nobody


def test_spread_copies_tokens() -> None:
    x = torch.randn(3, 8)
    x[1] = float("nan")
    assert_bitwise(moe.spread(x, POSITIONS, 3), torch.stack([x[0], x[2], x[2], x[0], torch.zeros(8)]))
    column = torch.randn(2, 3)[:1].t()  # three rows of one element, two elements apart
    assert_bitwise(moe.spread(column, POSITIONS, 3)[:4], column[[0, 2, 2, 0]])


def test_positions_are_the_inverse() -> None:
    assert_bitwise(moe.positions(ROW_MAP, 5), POSITIONS)
    assert_bitwise(moe.positions(ROW_MAP, 2), POSITIONS[:2])


def test_collect_adds_in_the_order_of_columns() -> None:
    rows = torch.tensor([[1e8], [2.0], [5.0], [1.0], [float("nan")]])
    expected = torch.tensor([[1e8 + 1.0], [0.0], [7.0]])
    assert_bitwise(moe.collect(rows, ROW_MAP, None), expected)
    assert_bitwise(moe.collect(rows, ROW_MAP[:1], None), expected[:1])
    weights = torch.tensor([[0.5, 9.0, 2.0], [9.0, 9.0, 9.0], [3.0, 0.5, 9.0]])
    assert_bitwise(moe.collect(rows, ROW_MAP, weights), torch.tensor([[0.5e8 + 2.0], [0.0], [8.5]]))


def test_backward_is_the_gradient() -> None:
    rows, weights = torch.randn(5, 8, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    grad = torch.randn(3, 8)
    terms = [
        (weights[t, c] * rows[ROW_MAP[t, c]] * grad[t]).sum()
        for t in range(3)
        for c in range(3)
        if ROW_MAP[t, c] >= 0
    ]
    drows, dweights = torch.autograd.grad(torch.stack(terms).sum(), (rows, weights))
    ours, sums = moe.collect_backward(grad, rows.detach(), POSITIONS, weights.detach())
    assert_close(ours, drows, "fp32_sum_order")
    assert_close(sums[:4], dweights.flatten()[POSITIONS[:4]], "fp32_sum_order")
    assert sums[4] == 0


def test_backward_without_tokens_or_with_a_single_value() -> None:
    rows = torch.randn(5, 8)
    drows, sums = moe.collect_backward(rows[:0], rows, torch.full((5,), -1), rows.new_ones(0, 3))
    assert_bitwise(drows, torch.zeros(5, 8))
    assert_bitwise(sums, torch.zeros(5))
    one, position = torch.tensor([[3.0]]), torch.zeros(1, dtype=torch.int32)
    drows, sums = moe.collect_backward(one, one, position, torch.tensor([[0.5]]))
    assert drows.item() == 1.5
    assert sums.item() == 9.0
