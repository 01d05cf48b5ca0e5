"""GEMMs of groups of FP8 codes equal the products of the decoded matrices."""

import pytest
import torch

from . import grouped_gemm
from .checks import normal

SPLITS = [3, 0, 130]


def codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return normal(shape, torch.float32, seed).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_with_a_scale_per_group(dtype: torch.dtype) -> None:
    left, right = codes((140, 16), 0), codes((3, 10, 16), 1)
    scale_a, scale_b = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 1.0, 0.125])
    bias = normal((3, 10), torch.float32, 2)
    out = grouped_gemm.rows(
        left, scale_a, right, scale_b, torch.tensor(SPLITS), bias, left_block=1, right_block=1, alignment=1,
        dtype=dtype, rows=140, columns=10,
    )  # fmt: skip
    expected = left[3:133].float() @ right[2].float().t() * 0.5 + bias[2].to(dtype)
    assert torch.allclose(out[3:133].float(), expected, rtol=1e-2, atol=1e-2)
    assert (out[133:] == 0).all() and out.dtype == dtype


def test_rows_with_scales_per_block() -> None:
    left, right = codes((384, 256), 0), codes((3, 256, 256), 1)
    scale_a, scale_b = normal((384, 2), torch.float32, 2), normal((3, 2, 2), torch.float32, 3)
    out = grouped_gemm.rows(
        left, scale_a, right, scale_b, torch.tensor(SPLITS), None, left_block=1, right_block=128, alignment=128,
        dtype=torch.float32, rows=133, columns=250,
    )  # fmt: skip
    expected = torch.zeros(130, 250)
    for k in range(2):
        at = slice(128 * k, 128 * (k + 1))
        a = left[128:258, at].float() * scale_a[128:258, k : k + 1]
        b = right[2, :250, at].float() * scale_b[2, :, k].repeat_interleave(128)[:250, None]
        expected += a @ b.t()
    assert torch.allclose(out[3:], expected, rtol=1e-4, atol=1e-3)


def test_contraction() -> None:
    left, right = codes((10, 160), 0), codes((6, 160), 1)
    scale = torch.tensor([1.0, 2.0, 4.0])
    out = grouped_gemm.contraction(
        left, scale, right, scale, torch.tensor(SPLITS), left_block=1, right_block=1, alignment=16,
        dtype=torch.float32,
    )  # fmt: skip
    expected = left[:, 16:146].float() @ right[:, 16:146].float().t() * 16
    assert torch.allclose(out[2], expected, rtol=1e-5) and (out[1] == 0).all()


def test_contraction_with_scales_per_block() -> None:
    left, right = codes((10, 384), 0), codes((6, 384), 1)
    scale_a, scale_b = normal((10, 3), torch.float32, 2), normal((6, 3), torch.float32, 3)
    out = grouped_gemm.contraction(
        left, scale_a, right, scale_b, torch.tensor([128, 0, 100]), left_block=1, right_block=1, alignment=128,
        dtype=torch.float32,
    )  # fmt: skip
    a, b = left[:, 128:228].float() * scale_a[:, 1:2], right[:, 128:228].float() * scale_b[:, 1:2]
    assert torch.allclose(out[2], a @ b.t(), rtol=1e-4, atol=1e-4)
