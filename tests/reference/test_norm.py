"""Norms against PyTorch in fp64, their gradients against autograd, the residual and its rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.reference import norm, reduction

from .checks import DTYPES, assert_bitwise, assert_fresh, awkward_layouts, normal

EPS = 1e-5
SHAPES = [(1, 1), (3, 7), (33, 256), (5, 1000), (2, 3, 300), (17,), (0, 32)]


def expected(
    x: Tensor, weight: Tensor, bias: Tensor | None, normalization: str, zero_centered_gamma: bool
) -> Tensor:
    """The definition, in the precision of ``x``."""
    gamma = weight + 1.0 if zero_centered_gamma else weight
    if normalization == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], gamma, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], gamma, EPS)


def vectors(K: int, dtype: torch.dtype, normalization: str) -> tuple[Tensor, Tensor | None]:
    bias = normal((K,), dtype, seed=3) if normalization == "LayerNorm" else None
    return normal((K,), dtype, seed=2), bias


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("normalization", norm.NORMALIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_are_those_of_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, normalization: str, zero_centered_gamma: bool
) -> None:
    x, grad = normal(shape, dtype), normal(shape, dtype, seed=1)
    weight, bias = vectors(shape[-1], dtype, normalization)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = expected(*leaves, *[None] * (3 - len(leaves)), normalization, zero_centered_gamma)
    exact.backward(grad.double())
    gradients: list[Any] = [leaf.grad for leaf in leaves]

    summed, mean, rstd = norm.statistics(x, eps=EPS, normalization=normalization)
    assert summed is None
    assert (mean is None) == (normalization == "RMSNorm")
    assert rstd.shape == (x.numel() // shape[-1],)
    options = {"zero_centered_gamma": zero_centered_gamma}
    y = norm.forward(x, weight, bias, mean, rstd, **options)
    c1, c2, dweight, dbias = norm.gradient_statistics(grad, x, weight, mean, rstd, **options)
    dx = norm.backward(grad, x, weight, mean, rstd, c1, c2, **options)

    eps = max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(y.double(), exact.detach(), rtol=eps, atol=5e-6)
    # a row of one element has the gradient 0, from a difference of large numbers
    torch.testing.assert_close(dx.double(), gradients[0], rtol=2 * eps, atol=1e-5 if shape[-1] > 1 else 1e-3)
    torch.testing.assert_close(dweight.double(), gradients[1], rtol=1e-5, atol=1e-4)
    assert dweight.dtype == torch.float32
    if normalization == "LayerNorm":
        assert dbias is not None
        torch.testing.assert_close(dbias.double(), gradients[2], rtol=1e-5, atol=1e-4)
    else:
        assert dbias is None


@pytest.mark.parametrize("normalization", norm.NORMALIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_and_rounded_first(dtype: torch.dtype, normalization: str) -> None:
    x, residual = normal((9, 300), dtype), normal((9, 300), dtype, seed=1)
    summed, mean, rstd = norm.statistics(x, eps=EPS, normalization=normalization, residual=residual)
    assert summed is not None
    assert_bitwise(summed, x + residual)
    _, expected_mean, expected_rstd = norm.statistics(x + residual, eps=EPS, normalization=normalization)
    assert_bitwise(rstd, expected_rstd)
    if mean is not None:
        assert expected_mean is not None
        assert_bitwise(mean, expected_mean)
    assert_fresh([summed, rstd], [x, residual])


def test_residual_gradient_is_added_in_fp32() -> None:
    x, grad, other = (normal((5, 300), torch.bfloat16, seed=seed) for seed in range(3))
    weight, _ = vectors(300, torch.bfloat16, "RMSNorm")
    _, _, rstd = norm.statistics(x, eps=EPS, normalization="RMSNorm")
    c1, _, _, _ = norm.gradient_statistics(grad, x, weight, None, rstd, zero_centered_gamma=False)
    arguments = (weight, None, rstd, c1, None)
    wide = norm.backward(grad.float(), x.float(), *arguments, zero_centered_gamma=False)
    dx = norm.backward(grad, x, *arguments, zero_centered_gamma=False, residual_grad=other)
    assert_bitwise(dx, (wide + other.float()).bfloat16())


def test_statistics_have_the_documented_order() -> None:
    x = normal((7, 700), torch.float32, std=30.0)
    _, mean, rstd = norm.statistics(x, eps=EPS, normalization="LayerNorm")
    K = torch.full((7,), 700.0)
    total = reduction.row_sum(x) / K
    d = x - total[:, None]
    assert mean is not None
    assert_bitwise(mean, total)
    variance = reduction.row_sum(d * d) / K + EPS
    assert_bitwise(rstd, torch.ones(7) / variance.double().sqrt().float())


def test_a_zero_row_and_large_mean() -> None:
    x = torch.zeros(1, 64)
    _, _, rstd = norm.statistics(x, eps=EPS, normalization="RMSNorm")
    torch.testing.assert_close(rstd, torch.tensor([EPS**-0.5]))
    x = normal((4, 512), torch.float32) + 1e4  # mean of squares minus square of the mean would cancel
    _, mean, rstd = norm.statistics(x, eps=EPS, normalization="LayerNorm")
    y = norm.forward(x, torch.ones(512), None, mean, rstd, zero_centered_gamma=False)
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (512,), eps=EPS), rtol=1e-4, atol=1e-3)


def test_strides() -> None:
    x, grad = normal((6, 10), torch.bfloat16), normal((6, 10), torch.bfloat16, seed=1)
    weight, bias = vectors(10, torch.float32, "LayerNorm")
    _, mean, rstd = norm.statistics(x, eps=EPS, normalization="LayerNorm")
    y = norm.forward(x, weight, bias, mean, rstd, zero_centered_gamma=True)
    for layout, strided in awkward_layouts(x).items():
        assert_bitwise(norm.statistics(strided, eps=EPS, normalization="LayerNorm")[2], rstd, layout)
        assert_bitwise(norm.forward(strided, weight, bias, mean, rstd, zero_centered_gamma=True), y, layout)
    c1, c2, _, _ = norm.gradient_statistics(
        grad.t().contiguous().t(), x, weight, mean, rstd, zero_centered_gamma=True
    )
    dx = norm.backward(grad, x, weight, mean, rstd, c1, c2, zero_centered_gamma=True)
    assert_fresh([y, dx], [x, grad])


def test_refuses() -> None:
    x, weight, rstd = torch.ones(2, 4), torch.ones(4), torch.ones(2)
    with pytest.raises(
        ValueError, match="unknown normalization 'BatchNorm'; use one of 'LayerNorm' or 'RMSNorm'"
    ):
        norm.statistics(x, eps=EPS, normalization="BatchNorm")
    with pytest.raises(ValueError, match="rank 0"):
        norm.statistics(torch.tensor(1.0), eps=EPS, normalization="RMSNorm")
    with pytest.raises(ValueError, match="residual is torch.float16"):
        norm.statistics(x, eps=EPS, normalization="RMSNorm", residual=x.half())
    with pytest.raises(TypeError, match="got torch.float64"):
        norm.statistics(x.double(), eps=EPS, normalization="RMSNorm")
    with pytest.raises(
        ValueError, match=r"^the norm's weight and bias have shape \(4,\), got \(3,\); .* layer_norm_weight"
    ):
        norm.forward(x, torch.ones(3), None, None, rstd, zero_centered_gamma=False)
    with pytest.raises(ValueError, match=r"one value per row, \(2,\), got \(3,\)"):
        norm.forward(x, weight, None, None, torch.ones(3), zero_centered_gamma=False)
    with pytest.raises(ValueError, match=r"grad has shape \(1, 4\)"):
        norm.gradient_statistics(x[:1], x, weight, None, rstd, zero_centered_gamma=False)
    with pytest.raises(ValueError, match=r"residual_grad has shape \(1, 4\)"):
        norm.backward(x, x, weight, None, rstd, rstd, None, zero_centered_gamma=False, residual_grad=x[:1])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("normalization", norm.NORMALIZATIONS)
def test_normalized_is_statistics_and_forward(normalization: str, residual: bool) -> None:
    x, other = normal((9, 300), torch.bfloat16), normal((9, 300), torch.bfloat16, seed=1)
    weight, bias = vectors(300, torch.bfloat16, normalization)
    how: dict[str, Any] = {
        "eps": EPS,
        "normalization": normalization,
        "residual": other if residual else None,
    }
    y, *statistics = norm.normalized(x, weight, bias, zero_centered_gamma=True, **how)
    for ours, theirs in zip(statistics, norm.statistics(x, **how), strict=True):
        assert ours is theirs is None or assert_bitwise(ours, theirs) is None
    inner = x + other if residual else x
    assert_bitwise(y, norm.forward(inner, weight, bias, *statistics[1:], zero_centered_gamma=True))
