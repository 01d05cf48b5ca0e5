"""Tokens to experts and back: every copy, every sum and both gradients equal the reference's, byte for byte."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh

from narrowcast import kernels
from narrowcast.moe.rows import kept, row_map_of_mask
from narrowcast.reference import moe as reference

SHAPES = [(5, 3, 8), (11, 4, 70), (2, 2, 1100), (7, 9, 33), (1, 1, 1), (4, 3, 0), (0, 3, 16)]


def draw(tokens: int, experts: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Values with NaN, infinities and negative zeros among them, and a routing that leaves tokens out."""
    generator = torch.Generator().manual_seed(tokens + experts)
    row_map = row_map_of_mask(torch.rand(tokens, experts, generator=generator) < 0.5)
    rows = int(row_map.max()) + 1 if row_map.numel() else 0
    x, grad = (torch.randn(n, columns, generator=generator).to(dtype) for n in (rows + 2, tokens))
    for value, place in ((float("nan"), 0), (float("inf"), 3), (-0.0, 5)):
        x.view(-1)[place : place + 1] = value
    weights = torch.rand(tokens, experts, generator=generator) - 0.3
    return x, grad, row_map, weights, reference.positions(row_map, x.shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_the_reference(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    given = draw(*shape, dtype)
    x, grad, row_map, weights, positions = given
    dx, dgrad, drow_map, dweights, dpositions = (tensor.to(device) for tensor in given)
    for rows in (0, x.shape[0] // 2, x.shape[0]):
        assert_bitwise(kernels.moe.positions(drow_map, rows), reference.positions(row_map, rows), "positions")
    spread = kernels.moe.spread(dgrad, dpositions, shape[1])
    assert_fresh([spread], [dgrad])
    assert_bitwise(spread, reference.spread(grad, positions, shape[1]))
    for known in (row_map, kept(row_map, x.shape[0] // 2)):
        assert_bitwise(
            kernels.moe.collect(dx, known.to(device), None), reference.collect(x, known, None), "sum"
        )
    total = kernels.moe.collect(dx, drow_map, dweights)
    assert_bitwise(total, reference.collect(x, row_map, weights), "weighted sum")
    ours = kernels.moe.collect_backward(dgrad, dx, dpositions, dweights)
    theirs = reference.collect_backward(grad, x, positions, weights)
    assert_fresh([total, *ours], [dx, dgrad])
    assert_bitwise(ours[0], theirs[0], "gradient of the rows")
    assert_bitwise(ours[1], theirs[1], "gradient of the weights")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_bytes_are_moved(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randint(0, 256, (6, 2500), dtype=torch.uint8).view(dtype)
    positions = torch.tensor([5, -1, 0, 11, 3], dtype=torch.int32)
    moved = kernels.moe.spread(x.to(device), positions.to(device), 2)
    assert_bitwise(moved, reference.spread(x, positions, 2))


def test_what_cannot_be_moved_or_added(device: torch.device) -> None:
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="cannot move rows"):
        kernels.moe.spread(torch.zeros(2, 2, dtype=torch.float64, device=device), positions, 1)
    with pytest.raises(ValueError, match="cannot add up"):
        kernels.moe.collect(torch.zeros(2, 2, dtype=torch.uint8, device=device), positions[:, None], None)
