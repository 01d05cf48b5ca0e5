"""Groups and padding, against loops over blocks."""

import math

import pytest
import torch

from narrowcast.reference import layout

from .checks import EMPTY_SHAPES, assert_bitwise, normal

GROUPS = [(1, 16), (16, 1), (16, 16), (1, 32), (32, 32), (1, 128), (128, 1)]
SHAPES = [(1, 1), (16, 16), (33, 130), (128, 7), (5, 256)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_group_max_equals_a_loop(
    shape: tuple[int, int], group: tuple[int, int], device: torch.device
) -> None:
    x = normal(shape, torch.float32).abs()
    rows, columns = group
    expected = torch.stack([
        torch.stack([tile.max() for tile in line.split(columns, dim=1)]) for line in x.split(rows, dim=0)
    ])  # fmt: skip
    assert_bitwise(layout.group_max(x.to(device), rows, columns).cpu(), expected)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", [shape for shape in EMPTY_SHAPES if len(shape) == 2])
def test_group_max_of_nothing(shape: tuple[int, int], group: tuple[int, int]) -> None:
    expected = tuple(math.ceil(size / extent) for size, extent in zip(shape, group, strict=True))
    assert layout.group_max(torch.empty(shape), *group).shape == expected


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_multiply_groups_equals_repeated_factors(shape: tuple[int, int], group: tuple[int, int]) -> None:
    x = normal(shape, torch.float32)
    rows, columns = group
    factors = normal((math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)), torch.float32, seed=1)
    repeated = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
    out = torch.full(shape, math.nan)
    assert layout.multiply_groups(x, factors, rows, columns, out=out) is out
    assert_bitwise(out, x * repeated)
    assert_bitwise(layout.multiply_groups(x, factors, rows, columns, out=x), out)


def test_spread_repeats_tiles() -> None:
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    expected = [[1, 1, 1, 2, 2, 2]] * 2 + [[3, 3, 3, 4, 4, 4]] * 2
    assert layout.spread(values, 2, 3).tolist() == expected


def test_padding() -> None:
    x = torch.ones(3, 5)
    padded = layout.pad_matrix(x, 4, 8)
    assert padded.shape == (4, 8)
    assert padded.sum() == 15
    assert layout.pad_matrix(x, 3, 5) is x
    scales = layout.pad_scales(x.t(), 4, 8)
    assert scales.is_contiguous()
    assert scales.shape == (8, 8)
    assert torch.equal(scales[:5, :3], x.t())
    assert scales.sum() == 15


def test_magnitude_drops_nan_only() -> None:
    x = torch.tensor([-2.0, math.nan, -math.nan, -math.inf, -0.0])
    assert layout.magnitude(x).tolist() == [2.0, 0.0, 0.0, math.inf, 0.0]
    assert x[0] == -2.0


def test_a_vector_has_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"rank 2 or more, got shape \(4,\)"):
        layout.as_matrix(torch.ones(4))


def test_widen_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match=r"torch\.float64; use float32, bfloat16 or float16"):
        layout.widen(torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "strides"), [((5, 1), (1, 0)), ((1, 1), (0, 0)), ((3, 4), (4, 1)), ((4, 3), (1, 4))]
)
def test_bytes_of_rows_of_any_strides(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    x = normal((12,), torch.bfloat16).as_strided(shape, strides)
    assert torch.equal(layout.bytes_of_rows(x).view(torch.bfloat16), x)
