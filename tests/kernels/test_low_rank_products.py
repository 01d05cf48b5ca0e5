"""Products with thin matrices: the kernels and the reference, each to its own order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast.reference import low_rank_products as reference

from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from narrowcast.kernels import low_rank_products as kernel

SHAPES = [(1, 7, 1), (520, 63, 24), (130, 200, 16)]


def operands(M: int, N: int, rank: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return a wide matrix (M, N), and thin ones (M, r), (N, r) and (r, N)."""
    generator = torch.Generator().manual_seed(M + N + rank)
    made = [torch.randn(shape, generator=generator) for shape in ((M, N), (M, rank), (N, rank), (rank, N))]
    made[0] = made[0] * torch.randn(M, 1, generator=generator).exp()
    return [x.to(dtype).to(device) for x in made]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("M", "N", "rank"), SHAPES)
def test_products(M: int, N: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
    wide, left, right, turned = operands(M, N, rank, dtype, device)
    eps = torch.finfo(dtype).eps
    for thin in (right, turned.t()):
        exact, sizes = (a.double() @ b.double() for a, b in ((wide, thin), (wide.abs(), thin.abs())))
        exact_t, sizes_t = (a.double().t() @ b.double() for a, b in ((wide, left), (wide.abs(), left.abs())))
        for numerics in (kernel, reference):
            rows, columns = numerics.products(wide, thin, left)
            assert rows.dtype == dtype and columns.dtype == torch.float32
            assert bool(((rows - exact).abs() <= exact.abs() * eps + sizes * 2**-18 + 1e-7).all())
            assert bool(((columns - exact_t).abs() <= sizes_t * 2**-18).all())
            assert torch.equal(numerics.products(wide, thin, left)[1], columns)  # the same bits every time


@pytest.mark.parametrize(("M", "N", "rank"), [*SHAPES, (3, 70, 80)])
def test_add_product(M: int, N: int, rank: int, device: torch.device) -> None:
    base, left, right, turned = operands(M, N, rank, torch.bfloat16, device)
    more = [base.flip(0), base.flip(1), base * 0.3, base * 0.7]
    for thin, bases in ((right, [base]), (turned.t(), [base, *more[:2]]), (right, [base, *more])):
        for dtype in (torch.bfloat16, torch.float32):
            wide = [one.to(dtype) for one in bases]
            exact = sum(one.double() for one in wide) + left.double() @ thin.double().t()
            sizes = sum(one.abs().double() for one in wide) + left.abs().double() @ thin.abs().double().t()
            for numerics in (kernel, reference):
                made = numerics.add_product(wide, left, thin)
                assert made.dtype == dtype
                # the fifth base and products of high rank are rounded before the sum
                often = 1.0 if rank <= kernel.LARGEST_RANK and len(wide) <= kernel.MOST_BASES else 4.0
                error = (sizes if often > 1 else exact.abs()) * torch.finfo(dtype).eps * often / 2
                assert bool(((made - exact).abs() <= error + sizes * 2**-20).all())


def test_nothing_to_multiply(device: torch.device) -> None:
    wide, left, right, _ = operands(5, 6, 2, torch.bfloat16, device)
    assert kernel.add_product([wide[:0]], left[:0], right).shape == (0, 6)
    rows, columns = kernel.products(wide[:0], right, left[:0])
    assert rows.shape == (0, 2) and torch.equal(columns, torch.zeros(6, 2, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("M", "K", "N", "rank"), [(130, 256, 264, 16), (1, 48, 8, 3), (1000, 400, 512, 40)])
def test_a_gemm_of_hopper_adds_the_product_before_it_rounds(
    M: int, K: int, N: int, rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type != "cuda" or not kernel.has_gemm(device):
        pytest.skip("needs a Hopper GPU")
    generator = torch.Generator().manual_seed(M)
    left, right, thin_left, thin_right = (
        torch.randn(shape, generator=generator).to(device) for shape in ((M, K), (N, K), (M, rank), (rank, N))
    )
    codes = left.to(dtype), right.to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5], device=device), torch.tensor([0.25], device=device)
    thin = thin_left.bfloat16(), thin_right.bfloat16().t()
    exact = 0.125 * codes[0].double() @ codes[1].double().t() + thin[0].double() @ thin[1].double().t()
    for fast in (False, True):
        made = kernel.gemm(codes[0], scales[0], codes[1], scales[1], *thin, torch.bfloat16, fast)
        assert made is not None and ((made - exact).norm() / exact.norm()).item() < 3e-3
