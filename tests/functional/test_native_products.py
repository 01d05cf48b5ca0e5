"""The rows of ``PRODUCTS``, and the calls that gemm makes of them, against what PyTorch checks.

PyTorch has its checks three times: in the CUDA source, which no CPU runs and ``published_rules`` repeats; in Python,
for tensors that pretend to be on a GPU; and, from 2.14 on, in the part of ``torch._scaled_mm_v2`` that CPUs share.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from recipes import E4M3, E5M2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map

import narrowcast as nc
from narrowcast import _device
from narrowcast.functional.native_products import PRODUCTS
from narrowcast.quantizers.float8_rows import Float8RowsQuantizer
from narrowcast.upstream import versions

gemm_module = importlib.import_module("narrowcast.functional.gemm")
TORCH = TorchVersion(torch.__version__)
HIGH = (torch.bfloat16, torch.float16, torch.float32)
GPUS = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))


def quantizer(scaling: str, element: nc.DType) -> nc.Quantizer:
    if scaling in ("1x128", "128x128"):
        dim = 1 if scaling == "1x128" else 2
        return nc.Float8BlockQuantizer(element, rowwise=True, columnwise=True, block_scaling_dim=dim)
    kinds = {
        "tensor": nc.Float8CurrentScalingQuantizer,
        "row": Float8RowsQuantizer,
        "1x32": nc.MXFP8Quantizer,
    }
    return nc.NVFP4Quantizer() if scaling == "1x16" else kinds[scaling](element)


def operand(scaling: str, element: nc.DType, rows: int, contraction: int) -> Any:
    made = quantizer(scaling, element).replace(internal=True)
    return made._native_operand(made.quantize(torch.randn(rows, contraction)).rowwise_operand(), False)


class Call(NamedTuple):
    """What an entry of the library was called with; recipes of None are inferred from the scales."""

    left: Tensor
    right: Tensor
    scales: tuple[list[Tensor], list[Tensor]]
    recipes: tuple[Any, Any] | None
    swizzles: tuple[Any, Any]
    bias: Tensor | None
    dtype: torch.dtype
    fast: bool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of both entries, which return zeros."""
    made: list[Call] = []

    def take(call: Call) -> Tensor:
        made.append(call)
        return torch.zeros(call.left.shape[0], call.right.shape[1], dtype=call.dtype)

    def inferred(a: Any, b: Any, scale_a: Any, scale_b: Any, **named: Any) -> Tensor:
        return take(Call(a, b, ([scale_a], [scale_b]), None, ((), ()), *named.values()))

    def told(
        a: Any, b: Any, sa: Any, ra: Any, za: Any, sb: Any, rb: Any, zb: Any, bias: Any, dtype: Any
    ) -> Tensor:
        return take(Call(a, b, (sa, sb), (ra, rb), (za, zb), bias, dtype, False))

    monkeypatch.setattr(gemm_module, "scaled_mm", inferred)
    monkeypatch.setattr(gemm_module, "scaled_mm_by_recipe", told)
    return made


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def published_rules(call: Call) -> str:
    """Assert the rules of ScaledBlas.cpp for an NVIDIA GPU, and return the implementation that it selects."""
    a, b = call.left, call.right.t()
    four = a.dtype == torch.float4_e2m1fn_x2
    packed = 2 if four else 1
    contraction = a.shape[1]
    assert a.is_contiguous() and b.is_contiguous(), "row-major by column-major"
    assert contraction == b.shape[1]
    # the older entry counts bytes, the newer one codes
    assert contraction * (1 if call.recipes is None else packed) % 16 == 0
    assert b.shape[1] % 16 == 0 and b.shape[0] % 16 == 0
    assert not (a.dtype == b.dtype == torch.float8_e5m2)
    assert not (call.fast and four)
    if call.bias is not None:
        assert call.dtype in (torch.bfloat16, torch.float16)
        assert call.bias.dtype == call.dtype and call.bias.numel() == b.shape[0]
    for scales in call.scales:
        assert all(one.dtype == torch.float32 for one in scales[1:])
    first = [scales[0] for scales in call.scales]
    dtypes = {one.dtype for one in first}
    assert len(dtypes) == 1
    (dtype,) = dtypes

    def tiles(codes: Tensor, scale: Tensor, block: int) -> bool:
        blocks = -(-codes.shape[1] * packed // block)
        return scale.is_contiguous() and scale.numel() == up(codes.shape[0], 128) * up(blocks, 4)

    if call.recipes is None:
        if dtype == torch.float8_e8m0fnu:
            assert all(tiles(codes, scale, 32) for codes, scale in zip((a, b), first))
            return "mxfp8"
        assert dtype == torch.float32
        if all(one.numel() == 1 for one in first):
            return "tensor"
        assert first[0].shape == (a.shape[0], 1) and first[1].shape == (1, b.shape[0])
        assert first[0].is_contiguous() and first[1].is_contiguous()
        assert call.dtype == torch.bfloat16
        return "row"
    recipes = tuple(tuple(ScalingType(value) for value in recipe) for recipe in call.recipes)
    micro = (ScalingType.BlockWise1x16, ScalingType.TensorWise)
    if recipes == (micro, micro):
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and dtype == torch.float8_e4m3fn
        for codes, scales, swizzles in zip((a, b), call.scales, call.swizzles):
            assert len(scales) == 2 and scales[1].numel() == 1
            assert [SwizzleType(value) for value in swizzles] == [
                SwizzleType.SWIZZLE_32_4_4,
                SwizzleType.NO_SWIZZLE,
            ]
            assert tiles(codes, scales[0], 16)
        return "nvfp4"
    row, tile = (ScalingType.BlockWise1x128,), (ScalingType.BlockWise128x128,)
    assert recipes in ((row, row), (row, tile), (tile, row))
    assert a.dtype == b.dtype == torch.float8_e4m3fn and dtype == torch.float32
    blocks = -(-contraction // 128)
    for codes, scales, recipe in zip((a, b), call.scales, recipes):
        (scale,) = scales
        rows = codes.shape[0]
        wanted = (rows, blocks) if recipe == row else (up(blocks, 4), -(-rows // 128))
        assert tuple(scale.shape) == wanted
        assert scale.stride(0) == 1 and (scale.stride(1) == wanted[0] or wanted[1] == 1)
    return "128-block"


def python_checks(call: Call) -> None:
    """Let PyTorch check a call in Python as if its tensors were on a GPU; builds for CPUs can from 2.13 on."""
    if TORCH < "2.13" and not torch.backends.cuda.is_built():
        return

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with FakeTensorMode():
        send(tree_map(on_gpu, call))


def send(call: Call) -> Tensor:
    if call.recipes is None:
        scales = call.scales[0][0], call.scales[1][0]
        return torch._scaled_mm(
            call.left, call.right, *scales, bias=call.bias, out_dtype=call.dtype, use_fast_accum=call.fast
        )
    sides = [(*side,) for side in zip(call.scales, call.recipes, call.swizzles)]
    return torch._scaled_mm_v2(call.left, call.right, *sides[0], *sides[1], call.bias, call.dtype)


IMPLEMENTATIONS = {"tensor": "tensor", "row": "row", "1x128": "128-block", "128x128": "128-block"}
IMPLEMENTATIONS |= {"1x32": "mxfp8", "1x16": "nvfp4"}


@pytest.mark.parametrize("size", [(33, 23, 72), (160, 192, 320), (128, 128, 128), (7, 200, 1000)], ids=str)
@pytest.mark.parametrize("pair", PRODUCTS, ids="-".join)
def test_every_call_passes_the_checks_of_pytorch(
    pair: tuple[str, str], size: tuple[int, int, int], calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_module, "FEW_ROWS", 0)
    product = PRODUCTS[pair]
    rows, columns, contraction = size
    if "row" in pair:  # other sizes go to a kernel
        columns, contraction = up(columns, product.columns), up(contraction, product.contraction)
    elements = [(E4M3, E4M3)] + [(E5M2, E4M3), (E4M3, E5M2)] * product.e5m2
    for left, right in elements:
        a, b = operand(pair[0], left, rows, contraction), operand(pair[1], right, columns, contraction)
        for dtype in product.outputs:
            for bias in (None, torch.randn(columns)):
                out = gemm_module.multiply_native(a, b, bias, dtype, rows, columns, True)
                assert out.shape == (rows, columns) and out.dtype == dtype
                call = calls.pop()
                assert published_rules(call) == next(
                    IMPLEMENTATIONS[one] for one in pair if "row" not in pair or one == "row"
                )
                assert (call.bias is not None) == (bias is not None and dtype in product.bias)
                assert call.fast == product.fast
                python_checks(call)
    assert not calls


def test_cpus_refuse_nvfp4_for_its_order_of_scales_alone(calls: list[Call]) -> None:
    """From 2.14 on PyTorch checks scales, recipes and swizzles of a GPU's call before it looks at the device."""
    a, b = operand("1x16", E4M3, 33, 72), operand("1x16", E4M3, 24, 72)
    gemm_module.multiply_native(a, b, None, torch.bfloat16, 33, 24, False)
    if TORCH < "2.14":
        pytest.skip(f"torch {torch.__version__} does not check this on a CPU")
    with pytest.raises(ValueError, match="CPU does not support swizzle"):
        send(calls[0])
    one_each = calls[0]._replace(swizzles=([SwizzleType.SWIZZLE_32_4_4.value],) * 2)
    with pytest.raises(ValueError, match="swizzle_a must have 2 values"):
        send(one_each)


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_each_gpu_takes_its_rows(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "get_device_compute_capability", lambda: gpu)
    monkeypatch.setattr(gemm_module.kernels, "AVAILABLE", True)
    _device._native.cache_clear()
    scalings = sorted({one for pair in PRODUCTS for one in pair})
    taken = {
        (left, right)
        for left in scalings
        for right in scalings
        if gemm_module._multiplies_natively(operand(left, E4M3, 16, 32), operand(right, E4M3, 16, 32))
    }
    _device._native.cache_clear()
    wanted = set()
    if gpu >= (8, 9):
        wanted |= {("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("tensor", "row")}
    if gpu[0] == 9:
        wanted |= {("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")}
    if gpu[0] == 10:
        wanted |= {("1x32", "1x32")}
    if gpu >= (10, 0):
        wanted |= {("1x16", "1x16")}
    assert taken == wanted


@pytest.mark.parametrize("pair", [pair for pair in PRODUCTS if pair != ("1x16", "1x16")], ids="-".join)
def test_e5m2_on_a_side(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_module, "is_native", lambda _: True)
    monkeypatch.setattr(gemm_module.kernels, "AVAILABLE", True)
    for left, right in ((E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)):
        a, b = operand(pair[0], left, 16, 32), operand(pair[1], right, 16, 32)
        assert gemm_module._multiplies_natively(a, b) == (PRODUCTS[pair].e5m2 and left != right)


@pytest.mark.parametrize("pair", PRODUCTS, ids="-".join)
def test_a_row_ran_on_gpus_that_the_tests_ran_on(pair: tuple[str, str]) -> None:
    product = PRODUCTS[pair]
    first, below = _device.NATIVE[product.format]
    for gpu in product.ran:
        assert gpu in versions.GPU_TESTS
        assert first <= gpu and (below is None or gpu < below)


def sm(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def row_of_the_page(pair: tuple[str, str]) -> str:
    """The row of docs/gemm.md for a pair."""
    product = PRODUCTS[pair]
    first, below = _device.NATIVE[product.format]
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    padding = (product.rows, product.columns, product.contraction)
    cells = (
        " by ".join(pair),
        f"{sm(first)} and newer" if below is None else f"{sm(first)} until {sm(below)}",
        "`_scaled_mm`" if product.recipes is None else "`_scaled_mm_v2`",
        "E4M3, one may be E5M2" if product.e5m2 else "E2M1" if pair == ("1x16", "1x16") else "E4M3",
        ", ".join(name for dtype, name in short.items() if dtype in product.outputs),
        ", ".join(name for dtype, name in short.items() if dtype in product.bias) or "none",
        ", ".join(map(str, padding)),
        ", ".join(sm(one) for one in product.ran) or "no GPU yet",
    )
    return "| " + " | ".join(cells) + " |"


def test_the_page_lists_the_rows() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "gemm.md").read_text()
    header = "| pair | compute capability | entry | codes | results | bias added | multiples | ran on |"
    assert "\n".join([header, "| " + "--- | " * 7 + "--- |", *map(row_of_the_page, PRODUCTS)]) in page
