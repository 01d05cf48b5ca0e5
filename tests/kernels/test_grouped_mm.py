"""Products of groups in high precision: no rounding before the result's own."""

from __future__ import annotations

import pytest
import torch

from narrowcast.reference import grouped_mm as reference

from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from narrowcast.kernels import grouped_mm as kernel


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("splits", "behind", "N", "K"), [([20, 0, 70], 3, 40, 130), ([0, 1], 0, 7, 1), ([0], 2, 5, 5)], ids=str
)
def test_contraction(
    splits: list[int], behind: int, N: int, K: int, operands: torch.dtype, device: torch.device
) -> None:
    rows, generator = sum(splits) + behind, torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, size, generator=generator).to(operands) for size in (N, K))
    for dtype in (torch.float32, torch.bfloat16):
        made = kernel.contraction(
            left.to(device), right.to(device), torch.tensor(splits, device=device), dtype
        )
        assert made.shape == (len(splits), N, K)
        assert made.dtype == dtype
        expected = reference.contraction(left, right, torch.tensor(splits), dtype)
        assert expected.dtype == dtype and torch.allclose(made.cpu(), expected, rtol=2**-7, atol=1e-5)
        parts = zip(
            expected if dtype == torch.bfloat16 else made.cpu(),
            left.split([*splits, behind]),
            right.split([*splits, behind]),
        )
        for group, (own, a, b) in enumerate(parts):
            exact = a.double().t() @ b.double()
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            assert torch.allclose(own.double(), exact, rtol=tolerance, atol=1e-5), group
            assert splits[group] or not own.any()


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("splits", "behind", "N", "K"), [([20, 0, 150], 3, 40, 130), ([0, 1], 0, 7, 1), ([0], 2, 5, 5)], ids=str
)
def test_rows(
    splits: list[int], behind: int, N: int, K: int, operands: torch.dtype, device: torch.device
) -> None:
    """Of weights as they lie, and transposed."""
    count, generator = sum(splits), torch.Generator().manual_seed(1)
    left = torch.randn(count + behind, K, generator=generator).to(operands)
    right = torch.randn(len(splits), N, K, generator=generator).to(operands)
    sizes = torch.tensor(splits)
    for dtype in (torch.float32, torch.bfloat16):
        expected = reference.rows(left, right, sizes, dtype)
        exact = [a.double() @ b.double().t() for a, b in zip(left.split([*splits, behind]), right)]
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        assert torch.allclose(expected[:count].double(), torch.cat(exact), rtol=tolerance, atol=1e-5)
        assert not expected[count:].any()
        for weights in (right, right.mT.contiguous().mT):
            made = kernel.rows(left.to(device), weights.to(device), sizes.to(device), dtype)
            assert made.dtype == dtype
            assert torch.allclose(made.cpu()[:count], expected[:count], rtol=2**-7, atol=1e-5)


def test_refuses(device: torch.device) -> None:
    left, splits = torch.ones(4, 3, dtype=torch.bfloat16, device=device), torch.tensor([4], device=device)
    for right, message in (
        (left[:2], "one length"),
        (left.t().contiguous().t(), "contiguous"),
        (left.half(), "on both sides"),
        (left.float(), "right is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.contraction(left, right, splits, torch.float32)
    assert kernel.contraction(left[:, :0], left, splits, torch.float32).shape == (1, 0, 3)
