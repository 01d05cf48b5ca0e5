"""Products whose rows do not depend on each other: the kernel and the reference, each to its own order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast import DType, Float8BlockQuantizer, Float8CurrentScalingQuantizer
from narrowcast.quantizers import Float8RowsQuantizer
from narrowcast.reference import batch_invariant as reference

from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from narrowcast.kernels import batch_invariant as kernel


E4M3 = DType.kFloat8E4M3


@pytest.fixture(autouse=True)
def products_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies tiles with NumPy's BLAS, which on some CPUs sums a row by its place there."""
    monkeypatch.setattr(
        np, "matmul", lambda a, b, dtype=None: np.einsum("...ik,...kn->...in", a, b, dtype=dtype)
    )


def operands(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(M + N + K)
    left, right = (torch.randn(size, K, generator=generator) for size in (M, N))
    spread = torch.randn(M, 1, generator=generator).mul(3).exp()
    return (left * spread).to(dtype).to(device), right.to(dtype).to(device)


def assert_close_to_exact(
    made: Tensor, left: Tensor, right: Tensor, scale: Tensor | float = 1.0, bits: int = 19
) -> None:
    exact, sizes = (a.double() @ b.double().mT for a, b in ((left, right), (left.abs(), right.abs())))
    assert bool(((made - exact * scale).abs() <= sizes * scale * 2**-bits + 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(70, 65, 100), (3, 130, 512), (1, 7, 1024)])
def test_matmul(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    left, right = operands(M, N, K, dtype, device)
    scales = torch.rand(M, device=device), torch.rand(N, device=device)
    splits = reference.splits_of(K)
    for matmul in (reference.matmul, kernel.matmul):
        made, scaled = matmul(left, right, splits), matmul(left, right, splits, scales)
        assert made.dtype == torch.float32
        assert_close_to_exact(made, left, right)
        assert_close_to_exact(scaled, left, right, scales[0][:, None] * scales[1])
        for at in (0, M // 2, M - 1):  # a row alone, at another place of its tile
            assert torch.equal(matmul(left[at:], right, splits)[0], made[at])
        if splits > 1:  # as two processes add their sums
            halves = [matmul(a, b, splits // 2, scales) for a, b in zip(left.chunk(2, 1), right.chunk(2, 1))]
            assert torch.equal(halves[0] + halves[1], scaled)


SCALING = {
    "tensor": Float8CurrentScalingQuantizer(E4M3, columnwise=False),
    "row": Float8RowsQuantizer(E4M3, columnwise=False),
    "1x128": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=1),
    "128x128": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False),
}


@pytest.mark.parametrize("scaling", SCALING)
@pytest.mark.parametrize(("M", "N", "K"), [(70, 140, 160), (3, 65, 512), (1, 130, 1024)])
def test_multiply_codes(M: int, N: int, K: int, scaling: str, device: torch.device) -> None:
    right_quantizer = SCALING[scaling]
    left_quantizer = SCALING["1x128"] if scaling == "128x128" else right_quantizer
    left, right = (
        quantizer(x)
        for quantizer, x in zip((left_quantizer, right_quantizer), operands(M, N, K, torch.float32, device))
    )
    (a, a_scale, *_), (b, b_scale, *_) = (
        one._quantizer._native_operand(one.rowwise_operand(), False) for one in (left, right)
    )
    b_scale = b_scale.t() if scaling == "128x128" else b_scale
    sizes = {
        "block": {"tensor": 0, "row": 0}.get(scaling, 128),
        "right_block": 128 if scaling == "128x128" else 1,
    }
    splits = reference.splits_of(K)

    def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, splits: int) -> Tensor:
        return kernel.multiply_codes(a, a_scale, b, b_scale, splits, torch.float32, **sizes)

    made = multiply(a, b, a_scale, b_scale, splits)
    # the tensor cores add FP8 products in 14 bits
    assert_close_to_exact(
        made, left.dequantize(), right.dequantize(), bits=11 if device.type == "cuda" else 19
    )
    for at in (0, M // 2, M - 1):
        scale = a_scale if scaling == "tensor" else a_scale[at:]
        assert torch.equal(multiply(a[at:], b, scale, b_scale, splits)[0], made[at])
    if splits > 1:
        parts = [
            multiply(*codes, *scales, splits // 2)
            for codes, scales in zip(
                zip(a.chunk(2, 1), b.chunk(2, 1)),
                zip(a_scale.split(K // 2 // sizes["block"], 1), b_scale.split(K // 2 // sizes["block"], 1))
                if sizes["block"]
                else [(a_scale, b_scale)] * 2,
            )
        ]
        assert torch.equal(parts[0] + parts[1], made)


@pytest.mark.parametrize("part", [reference, "kernel"], ids=["reference", "kernel"])
def test_mix(part: object, device: torch.device) -> None:
    numerics = kernel if part == "kernel" else reference
    weights = torch.rand(2, 3, 9, 300, device=device)
    weights[..., 0, 150:] = 0
    weights[..., 280:] = 0
    values = torch.randn(2, 3, 300, 17, device=device) * torch.rand(300, 1, device=device).mul(9).exp()
    values[..., 290:, :] = float("nan")
    made = numerics.mix(weights, values)
    assert_close_to_exact(made, weights[..., :280], values[..., :280, :].mT)
    first = numerics.mix(weights[..., :1, :150], values[..., :150, :])
    assert torch.equal(first, made[..., :1, :])


def test_softmax(device: torch.device) -> None:
    """Equal to the reference, and of whatever length."""
    logits = torch.randn(3, 7, 700, device=device) * 20
    logits[0, 1, 650:] = float("-inf")
    logits[0, 2] = float("-inf")
    logits[0, 3, 5] = float("nan")
    logits[0, 4] = -200.0
    for length in (700, 256, 3):
        x = logits[..., :length]
        made, expected = kernel.softmax(x).cpu(), reference.softmax(x.cpu())
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(kernel.softmax(logits[:1, 1:2, :650]), kernel.softmax(logits)[:1, 1:2, :650])
    with pytest.raises(ValueError, match="give torch.float32"):
        kernel.softmax(logits.half())


def test_empty(device: torch.device) -> None:
    for numerics in (reference, kernel):
        for M, N, K in ((0, 3, 5), (3, 0, 5), (3, 5, 0)):
            left, right = torch.ones(M, K, device=device), torch.ones(N, K, device=device)
            assert torch.equal(numerics.matmul(left, right), torch.zeros(M, N, device=device))
        no_keys = numerics.mix(torch.ones(2, 3, 0, device=device), torch.ones(2, 0, 4, device=device))
        assert torch.equal(no_keys, torch.zeros(2, 3, 4, device=device))


def test_what_is_not_finite_stays_in_its_row() -> None:
    left, right = operands(5, 6, 200, torch.float32, torch.device("cpu"))
    expected = reference.matmul(left, right)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoiled = left.clone()
        spoiled[2, 150] = bad
        made = reference.matmul(spoiled, right)
        assert not bool(made[2].isfinite().any())
        assert torch.equal(made[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_exponentials_and_logarithms() -> None:
    """Of any length, since PyTorch's own differ by a bit between a vector and what is left after the last."""
    x = torch.cat((-torch.rand(997) * 90, torch.tensor([0.0, float("-inf"), float("nan")])))
    made, exact = reference.exp(x), x.double().exp()
    tolerance = (0.7 * x.abs() + 3) * 2**-23
    assert torch.equal(made[-3:].nan_to_num(7.0), torch.tensor([1.0, 0.0, 7.0]))
    seen = x > -86
    assert bool(((made - exact).abs() <= tolerance * exact)[seen].all())
    y = torch.cat((torch.rand(997).mul(60).sub(30).exp(), torch.tensor([0.0, 1.0, float("inf"), 1e-42])))
    assert torch.equal(reference.log(y), y.double().log().float())
    logits = torch.randn(5, 700) * 20
    logits[1, :650] = float("-inf")
    assert torch.allclose(reference.softmax(logits), logits.softmax(1), rtol=2e-5, atol=1e-30)
    assert torch.allclose(reference.logsumexp(logits), logits.logsumexp(1), rtol=1e-6)
    nothing = torch.full((1, 4), float("-inf"))
    assert torch.equal(reference.softmax(nothing), torch.zeros(1, 4))
    assert float(reference.logsumexp(nothing)) == float("-inf")


def test_refuses(device: torch.device) -> None:
    left = torch.ones(2, 3, device=device)
    with pytest.raises(ValueError, match=r"right is torch\.float16; give fp32, bf16 or fp16 on both sides"):
        kernel.matmul(left, left.half())
