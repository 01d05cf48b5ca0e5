"""Kernels of the cross entropy against the reference; exponentials differ by an ulp, so not to the byte."""

from __future__ import annotations

import pytest
import torch

from narrowcast import kernels
from narrowcast.reference import cross_entropy as reference
from narrowcast.testing import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 9000), (3, 16), (2, 2), (1, 4097)], ids=str)
def test_equal_to_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, columns = shape
    x = (4 * torch.randn(shape)).to(dtype)
    target = torch.randint(-columns, 2 * columns, (rows,))
    target[0] = columns - 1
    statistics = reference.statistics(x, target)
    made = kernels.cross_entropy.statistics(x.to(device), target.to(device))
    for ours, theirs in zip(made, statistics):
        assert_close(ours, theirs, "fp32_sum_order")
    grad = torch.randn(rows)
    grad[-1] = 0.0
    arguments = (x, target, statistics[0], grad)
    expected = reference.gradient(*arguments, 0.9, 0.1 / columns)
    moved = [tensor.to(device) for tensor in arguments]
    made = kernels.cross_entropy.gradient(*moved, 0.9, 0.1 / columns)
    entry = "fp32_sum_order" if dtype == torch.float32 else "bf16_output"
    assert_close(made, expected, entry)
    assert torch.equal(moved[0].cpu(), x)
    assert not made[-1].any()
    over = kernels.cross_entropy.gradient(*moved, 0.9, 0.1 / columns, in_place=True)
    assert over.data_ptr() == moved[0].data_ptr()
    assert torch.equal(over, made)


def test_not_finite(device: torch.device) -> None:
    inf = float("inf")
    x = torch.tensor([[-inf, 1.0, 2.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [float("nan"), 0.0, 0.0]])
    target = torch.tensor([1, 1, 1, 1])
    made = kernels.cross_entropy.statistics(x.to(device), target.to(device)).cpu()
    expected = reference.statistics(x, target)
    assert made[0, 0].isclose(expected[0, 0])
    assert made[0, 1] == expected[0, 1] == -inf
    assert not made[0, 2].isfinite() and made[0, 3].isnan()


def test_strides_and_no_rows(device: torch.device) -> None:
    x = torch.randn(40, 6, device=device).t()
    target = torch.arange(12, device=device)[::2]
    assert_close(
        kernels.cross_entropy.statistics(x, target), reference.statistics(x, target), "fp32_sum_order"
    )
    assert kernels.cross_entropy.statistics(x[:0], target[:0]).shape == (3, 0)
    with pytest.raises(ValueError, match="float64"):
        kernels.cross_entropy.statistics(x.double(), target)
    with pytest.raises(ValueError, match=r"\(6, 40\) and \(5,\)"):
        kernels.cross_entropy.statistics(x, target[:5])
