"""A few rows in one kernel: the product of the codes that the reference defines, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast import reference
from narrowcast.formats import E4M3

from .checks import make
from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from narrowcast.kernels import few_rows as kernel

HOW = {"rowwise": True, "columnwise": False}


def quantized(x: Tensor, scaling: str, scale: Tensor, power_2: bool, epsilon: float) -> list[Tensor]:
    rule = {"power_2": power_2, "epsilon": epsilon}
    if scaling == "given":
        return reference.float8.quantize(x, scale[1:2], E4M3, **HOW)
    if scaling == "current":
        return reference.float8.quantize_current(x, E4M3, **HOW, **rule)
    return reference.float8_block.quantize(x, E4M3, **HOW, block_dim=1, **rule)


def decoded(operand: list[Tensor], tiles: bool | None) -> Tensor:
    codes, scale_inv = operand
    if tiles is None:
        return reference.dequantize.float8(codes, scale_inv, fmt=E4M3, dtype=torch.float32)
    decode = reference.dequantize.float8_block_rowwise
    return decode(codes, scale_inv, fmt=E4M3, dtype=torch.float32, two_d=tiles)


CASES = [
    # rows, N, K: K of whole tiles and not, N below a tile, several parts of the contraction
    (1, 5, 16), (1, 33, 2051), (1, 130, 4096), (2, 65, 100), (7, 64, 1024), (17, 129, 1032), (64, 66, 640),
    (33, 3, 2050),
]  # fmt: skip


@pytest.mark.parametrize("scaling", ["current", "given", "1x128"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_product_of_the_codes(case: int, scaling: str, device: torch.device) -> None:
    M, N, K = CASES[case]
    dtype, power_2, epsilon = (
        (torch.bfloat16, torch.float16, torch.float32)[case % 3],
        case % 2 == 1,
        (0.0, 1e-3)[case % 2],
    )
    x, weight = make("normal", (M, K), dtype, case).to(device), make("normal", (N, K), torch.float32, 7)
    bias = None if case % 2 else make("normal", (N,), torch.float32, 9).to(device)
    scale = torch.tensor([2.0, 5.3], device=device)
    inp = quantized(x, scaling, scale, power_2, epsilon)
    if scaling == "1x128":
        operand = reference.float8_block.quantize(
            weight.to(device), E4M3, **HOW, block_dim=2, power_2=False, epsilon=0.0
        )
        a, b, weight_scale = decoded(inp, False), decoded(operand, True), operand[1].t()
    else:
        operand = reference.float8.quantize_current(
            weight.to(device), E4M3, power_2=False, epsilon=0.0, **HOW
        )
        a, b, weight_scale = decoded(inp, None), decoded(operand, None), operand[1]
    out_dtype = torch.bfloat16 if case % 4 == 0 else torch.float32
    made = kernel.matmul(
        x, operand[0], weight_scale, bias, out_dtype, scaling=scaling, scale=scale, slot=1, power_2=power_2,
        epsilon=epsilon,
    )  # fmt: skip
    results = [made]
    if scaling == "1x128":
        results.append(kernel.multiply_codes(*inp, operand[0], weight_scale, bias, out_dtype))
    assert all(one.shape == (M, N) and one.dtype == out_dtype and one.is_contiguous() for one in results)
    exact, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.to(out_dtype).double(), size + bias.double().abs()
    # the sums are fp32 in any order; the tensor cores keep fewer bits of a sum within a tile
    bound = size * (2**-17 if device.type == "cpu" else 2**-10) + exact.abs() * torch.finfo(out_dtype).eps
    for one in results:
        assert bool(((one.double() - exact).abs() <= bound + 1e-30).all())


@pytest.mark.parametrize("M", [1, 3])
def test_not_finite(M: int, device: torch.device) -> None:
    """An element that is NaN spoils its row; infinity the tensor under current scaling, its row under the others."""
    weight = make("normal", (40, 256), torch.float32, 1).to(device)
    tensor = reference.float8.quantize_current(weight, E4M3, power_2=False, epsilon=0.0, **HOW)
    tiles = reference.float8_block.quantize(weight, E4M3, **HOW, block_dim=2, power_2=True, epsilon=0.0)
    scale = torch.ones(1, device=device)
    for value, scaling in (
        (v, s) for v in (float("nan"), float("inf")) for s in ("current", "given", "1x128")
    ):
        x = make("normal", (M, 256), torch.bfloat16, 2).to(device)
        x[-1, 130] = value
        codes, of_weight = (tiles[0], tiles[1].t()) if scaling == "1x128" else tensor
        made = kernel.matmul(x, codes, of_weight, None, torch.float32, scaling=scaling, scale=scale)
        lost = M if (value, scaling) == (float("inf"), "current") else 1
        assert made.isnan().all(1).sum() == lost and made.isfinite().all(1).sum() == M - lost


@pytest.mark.parametrize("M", [1, 3])
def test_one_variant_reads_every_slot(M: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make("normal", (M, 64), torch.bfloat16, 3).to(device)
    weight = make("normal", (24, 64), torch.float32, 1).to(device)
    codes, weight_scale = reference.float8.quantize_current(
        weight, E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=False
    )
    launcher = kernel._one_row if M == 1 else kernel._few_rows
    monkeypatch.setattr(launcher, "variants", {})
    scales = torch.tensor([2.0, 5.3, 0.25, 40.0], device=device)
    for slot in range(4):
        given = [
            kernel.matmul(x, codes, weight_scale, None, torch.float32, scaling="given", scale=scale, slot=at)
            for scale, at in ((scales, slot), (scales[slot : slot + 1].clone(), 0))
        ]
        assert torch.equal(*given)
    assert len({constants for _, constants, _ in launcher.variants}) == 1
