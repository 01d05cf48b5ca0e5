"""Sums of columns and the folds they consist of, against the reference."""

from __future__ import annotations

import pytest
import torch
from reference.checks import DTYPES, assert_bitwise, awkward_layouts

from narrowcast import kernels
from narrowcast.reference import reduction as reference

from .checks import KINDS, SHAPES_2D, compare, grid, make

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from narrowcast.kernels.reduction import fold_lanes, fold_rows

    @triton.jit
    def fold_kernel(x_ptr, rows_ptr, lanes_ptr, R: tl.constexpr, C: tl.constexpr):
        row = tl.arange(0, R)
        column = tl.arange(0, C)
        x = tl.load(x_ptr + row[:, None] * C + column[None, :])
        tl.store(rows_ptr + column, fold_rows(x))
        tl.store(lanes_ptr + row, fold_lanes(x))


INTERPRETED_SHAPES = [(1, 1), (1, 70), (7, 3), (127, 65), (128, 64), (129, 2), (300, 5), (0, 8), (8, 0)]


def check(shape: tuple[int, int], kind: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(
        lambda x: [kernels.reduction.column_sum(x)],
        lambda x: [reference.column_sum(x.float())],
        make(kind, shape, dtype),
        device,
        kind,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
def test_column_sum(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(shape, "normal", dtype, device)


@pytest.mark.parametrize("kind", KINDS)
def test_column_sum_of_every_kind(kind: str, device: torch.device) -> None:
    for dtype in DTYPES:
        check((133, 9), kind, dtype, device)


def test_strides(device: torch.device) -> None:
    x = make("normal", (34, 20), torch.bfloat16)
    for name, strided in awkward_layouts(x.to(device)).items():
        assert_bitwise(kernels.reduction.column_sum(strided), reference.column_sum(x.float()), name)


@pytest.mark.parametrize("group", [16, 128])
def test_column_sum_of_partial_sums(group: int, device: torch.device) -> None:
    x = make("wide", (2100, 3), torch.float32)
    padded = torch.cat((x, torch.zeros(-2100 % group, 3)))
    partials = padded.view(-1, group, 3)
    while partials.shape[1] > 1:
        partials = partials[:, 0::2] + partials[:, 1::2]
    actual = kernels.reduction.column_sum(partials.squeeze(1).to(device))
    assert_bitwise(actual, reference.column_sum(x))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 32), (32, 1), (4, 256), (128, 16)])
def test_folds(rows: int, columns: int, device: torch.device) -> None:
    x = torch.randn(rows, columns) * 1e3
    by_rows, by_lanes = torch.empty(columns, device=device), torch.empty(rows, device=device)
    fold_kernel[(1,)](x.to(device), by_rows, by_lanes, rows, columns)
    for actual, v in ((by_rows, x), (by_lanes, x.t())):
        while v.shape[0] > 1:
            v = v[0::2] + v[1::2]
        assert_bitwise(actual, v.squeeze(0))


def test_refuses(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"takes a matrix, got shape \(2, 2, 2\)"):
        kernels.reduction.column_sum(torch.ones(2, 2, 2, device=device))


@pytest.mark.gpu
def test_every_shape_and_kind(device: torch.device) -> None:
    for shape, kind, dtype in grid([shape for shape in SHAPES_2D if len(shape) == 2]):
        check(shape, kind, dtype, device)
    check((70_000, 40), "normal", torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ranks", "rank", "n"), [(2, 0, 40000), (2, 1, 7), (3, 1, 17000), (4, 3, 1), (2, 0, 0), (2, 1, 800_001)]
)
def test_rank_sum(ranks: int, rank: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    alone = n < 500_000  # else a program has several turns
    rows = make("normal", (ranks, n), dtype)
    others = rows[[i for i in range(ranks) if i != rank]]
    for kept in (torch.float32, dtype):
        expected, found = torch.empty(n, dtype=kept), torch.empty(n, dtype=kept, device=device)
        reference.rank_sum(rows[rank], others, rank, ranks, expected)
        kernels.reduction.rank_sum(rows[rank].to(device), others.to(device), rank, ranks, found, alone)
        assert torch.equal(found.cpu(), expected)
        torch.testing.assert_close(expected, rows.float().mean(0).to(kept))
