"""Per-tensor FP8 of groups: every group as if it were alone, transposed codes at multiples of an alignment."""

import pytest
import torch

from narrowcast import reference
from narrowcast.formats import E4M3, E5M2, padded_rows

from .checks import DTYPES, assert_bitwise, assert_fresh, normal

SPLITS = ([5], [0, 0], [16, 0, 3, 33], [1] * 9)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beyond", [0, 4])
def test_groups_are_quantized_alone(splits: list[int], dtype: torch.dtype, beyond: int) -> None:
    x = normal((sum(splits) + beyond, 7), dtype)
    outputs = reference.grouped_quantize.quantize_current(
        x, torch.tensor(splits), E4M3, groups=len(splits), power_2=False, epsilon=0.0, rowwise=True, columnwise=True,
        alignment=16,
    )  # fmt: skip
    assert_fresh(outputs, [x])
    data, transpose, scale_inv = outputs
    padded = [-(-size // 16) * 16 for size in splits]
    assert transpose.shape == (7, padded_rows(x.shape[0], len(splits), 16))
    assert sum(padded) <= transpose.shape[1] and transpose.shape[1] % 16 == 0
    columns = transpose.split([*padded, transpose.shape[1] - sum(padded)], dim=1)
    for group, part in enumerate(x.split([*splits, beyond])[: len(splits)]):
        alone, turned, inverse = reference.float8.quantize_current(
            part, E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=True
        )
        at = sum(splits[:group])
        assert_bitwise(data[at : at + len(part)], alone)
        assert_bitwise(columns[group][:, : len(part)].contiguous(), turned)
        assert_bitwise(scale_inv[group : group + 1], inverse)
        assert (columns[group][:, len(part) :] == 0).all()
    assert (data[sum(splits) :] == 0).all() and (columns[-1] == 0).all()


def test_given_scales_and_amaxes() -> None:
    splits, x = [3, 0, 5], normal((8, 6), torch.bfloat16)
    scale, amax = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 0.5, 100.0])
    data, scale_inv = reference.grouped_quantize.quantize(
        x, torch.tensor(splits), scale, E5M2, rowwise=True, columnwise=False, alignment=16, amax=amax
    )
    assert torch.equal(scale_inv, 1 / scale)
    assert torch.equal(amax, torch.tensor([float(x[:3].abs().max()), 0.5, 100.0]))
    expected = (x[3:].float() * 4).to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(data[3:], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch(dtype: torch.dtype) -> None:
    x = normal((3, 5, 6), dtype)
    options = {"power_2": True, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    data, transpose, scale_inv = reference.grouped_quantize.quantize_current(
        x, None, E4M3, groups=3, alignment=16, **options
    )
    assert transpose.shape == (3, 6, 5)
    for group in range(3):
        alone = reference.float8.quantize_current(x[group], E4M3, **options)
        ours = (data[group], transpose[group], scale_inv[group : group + 1])
        for a, b in zip(ours, alone, strict=True):
            assert_bitwise(a, b)


def test_column_sum() -> None:
    splits, x = [3, 0, 70], normal((75, 5), torch.float16)
    sums = reference.grouped_quantize.column_sum(x, torch.tensor(splits))
    assert_bitwise(sums[0], reference.reduction.column_sum(x[:3].float()))
    assert_bitwise(sums[2], reference.reduction.column_sum(x[3:73].float()))
    assert (sums[1] == 0).all()
    assert reference.grouped_quantize.column_sum(x[:0], torch.tensor([], dtype=torch.int32)).shape == (0, 5)


def test_extents_are_cut_to_the_rows() -> None:
    splits = torch.tensor([4, 10, 3])
    assert reference.grouped_quantize.extents(splits, 9, 8) == ([4, 5, 0], [0, 4, 9], [0, 8, 24])
