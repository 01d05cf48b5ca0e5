"""Padding and unpadding of grouped rows: every byte is moved, for every size of element, group and alignment."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh

from narrowcast import kernels
from narrowcast.formats import round_up
from narrowcast.reference import grouped_padding as reference

DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SPLITS = [[5], [0], [], [3, 0, 17, 16, 1], [0, 0, 40], [32, 32], [1] * 9, [7, 0, 0]]


def values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes: NaN, too, must arrive unchanged."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (rows, columns * size), dtype=torch.uint8).view(dtype)


@pytest.mark.covering
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("alignment", "columns", "index"), [(16, 40, torch.int64), (32, 1, torch.int32), (1, 7, torch.int64)]
)
def test_equals_the_reference(
    alignment: int,
    columns: int,
    index: torch.dtype,
    dtype: torch.dtype,
    splits: list[int],
    device: torch.device,
) -> None:
    groups, total = torch.tensor(splits, dtype=index), sum(splits)
    x = values(total, columns, dtype)
    source = x.to(device)
    for rows in (
        sum(round_up(s, alignment) for s in splits),
        round_up(total, alignment) + 64,
        total // 2,
    ):
        expected = reference.pad_rows(x, groups, alignment, rows)
        actual = kernels.grouped_padding.pad_rows(source, groups.to(device), alignment, rows)
        assert_fresh(actual, [source])
        for a, b in zip(actual, expected, strict=True):
            assert_bitwise(a, b, f"{alignment} {rows}")
        back = kernels.grouped_padding.unpad_rows(actual[0], groups.to(device), alignment, total + 3)
        assert_bitwise(back, reference.unpad_rows(expected[0], groups, alignment, total + 3))


def test_wide_rows_and_many_groups(device: torch.device) -> None:
    splits = torch.randint(0, 4, (70,))
    x = values(int(splits.sum()), 2500, torch.bfloat16)
    expected = reference.pad_rows(x, splits, 8, 700)
    actual = kernels.grouped_padding.pad_rows(x.to(device), splits.to(device), 8, 700)
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)


def test_wrong_splits_never_read_beyond_the_tensor(device: torch.device) -> None:
    x = values(5, 3, torch.float32)
    splits = torch.tensor([4, 9])
    expected = reference.pad_rows(x, splits, 4, 20)
    actual = kernels.grouped_padding.pad_rows(x.to(device), splits.to(device), 4, 20)
    assert_bitwise(actual[0], expected[0])
    assert not actual[0][5:].view(torch.int32).any()


def test_strided_rows(device: torch.device) -> None:
    x = values(6, 8, torch.float16)
    splits = torch.tensor([4, 2])
    expected = reference.pad_rows(x[:, ::2], splits, 4, 8)
    assert_bitwise(
        kernels.grouped_padding.pad_rows(x.to(device)[:, ::2], splits.to(device), 4, 8)[0], expected[0]
    )


def test_refuses(device: torch.device) -> None:
    x = torch.zeros(4, 4, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="cannot move rows of torch.float64; use a dtype of 1, 2 or 4 bytes"):
        kernels.grouped_padding.pad_rows(x, torch.tensor([4], device=device), 16, 16)


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    x, splits = values(64, 32, torch.bfloat16).to(device), torch.tensor([10, 54], device=device)
    kernels.grouped_padding.pad_rows(x, splits, 16, 96)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded, padded_splits, _ = kernels.grouped_padding.pad_rows(x, splits, 16, 96)
    splits.copy_(torch.tensor([33, 31]))
    graph.replay()
    assert padded_splits.tolist() == [48, 32]
    assert_bitwise(padded, reference.pad_rows(x.cpu(), torch.tensor([33, 31]), 16, 96)[0])
