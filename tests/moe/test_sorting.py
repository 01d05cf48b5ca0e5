"""Chunks of rows in another order, against slices."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise

import narrowcast as nc

SIZES, ORDER = [3, 0, 5, 2], [2, 0, 3, 1]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_are_reordered(listed: bool, compiled: bool, device: str) -> None:
    x = torch.randn(12, 8, device=device, requires_grad=True)  # two rows belong to no chunk
    probs = torch.rand(12, device=device, requires_grad=True)
    sizes, order = (SIZES, ORDER) if listed else (torch.tensor(t, device=device) for t in (SIZES, ORDER))
    run = nc.moe_sort_chunks_by_index_with_probs
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    y, moved = run(x, probs, sizes, order)
    for given, result in ((x, y), (probs, moved)):
        chunks = given.split([*SIZES, 2])
        expected = torch.cat([*[chunks[i] for i in ORDER], chunks[-1]])
        assert_bitwise(result, expected)
        grad = torch.randn_like(expected)
        ours, theirs = (
            torch.autograd.grad(out, given, grad, retain_graph=True)[0] for out in (result, expected)
        )
        assert_bitwise(ours, theirs)
    assert_bitwise(nc.moe_sort_chunks_by_index(x, sizes, order), y)


def test_no_chunks_and_too_large_ones() -> None:
    x = torch.randn(4, 3)
    assert_bitwise(nc.moe_sort_chunks_by_index(x, [], []), x)
    assert nc.moe_sort_chunks_by_index(x, [9, 9], [1, 0]).isfinite().all()


def test_bad_arguments() -> None:
    x = torch.randn(4, 3)
    for sizes, order in (([1, 2], [0]), (torch.tensor([1.0, 2.0]), [0, 1])):
        with pytest.raises(ValueError, match="one of each for every chunk"):
            nc.moe_sort_chunks_by_index(x, sizes, order)
    for sizes in ([1.0, 3.0], "13", 4):
        with pytest.raises(TypeError, match="split_sizes is .*; pass integers, a tensor or a list"):
            nc.moe_sort_chunks_by_index(x, sizes, [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass rows"):
        nc.moe_sort_chunks_by_index(x[0], [4], [0])
    with pytest.raises(ValueError, match="one number for each of 4 rows"):
        nc.moe_sort_chunks_by_index_with_probs(x, x[0], [4], [0])
