"""MXFP8 and NVFP4 as a GPU of compute capability 10 would get them: the call, and what its operands say.

Nothing here has such a GPU. The bytes of a call are read by the published order of scales and multiplied;
``test_native_products`` checks the call itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recipes import E4M3, E5M2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowcast as nc
from narrowcast import _device, reference
from narrowcast.testing import assert_within_magnitude

gemm_module = importlib.import_module("narrowcast.functional.gemm")

QUANTIZERS: dict[str, tuple[nc.Quantizer, nc.Quantizer, nc.Quantizer]] = {  # x, w, dy
    "mxfp8": (nc.MXFP8Quantizer(E4M3),) * 3,
    "mxfp8_hybrid_2d": (
        nc.MXFP8Quantizer(E4M3),
        nc.MXFP8Quantizer(E4M3, with_2d_quantization=True),
        nc.MXFP8Quantizer(E5M2),
    ),
    "nvfp4": (
        nc.NVFP4Quantizer(with_rht=True),
        nc.NVFP4Quantizer(with_2d_quantization=True),
        nc.NVFP4Quantizer(with_rht=True),
    ),
    "nvfp4_4over6": (nc.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),) * 3,
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHAPES = [(33, 24, 72), (160, 192, 320)]  # M, N, K: smaller than a tile and unaligned; more than one tile


@pytest.fixture(params=[(10, 0)])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr(_device, "get_device_compute_capability", lambda: request.param)
    _device._native.cache_clear()
    yield request.param
    _device._native.cache_clear()


def operands(name: str, kind: str, m: int, n: int, k: int) -> list[tuple[nc.Quantizer, list[Tensor], bool]]:
    """Quantizer, buffers and direction of both sides."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        (quantizer.replace(internal=True), torch.randn(*size, generator=generator))
        for quantizer, size in zip(QUANTIZERS[name], ((m, k), (n, k), (m, n)))
    )
    sides = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[kind]
    return [
        (q, made.columnwise_operand() if columnwise else made.rowwise_operand(), columnwise)
        for (q, made), columnwise in zip(
            ((q, q.quantize(values)) for q, values in sides), gemm_module.COLUMNWISE[kind]
        )
    ]


def result_size(kind: str, m: int, n: int, k: int) -> tuple[int, int]:
    return {"fprop": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[kind]


def read_codes(codes: Tensor) -> Tensor:
    """(rows, contraction) as float64; of two codes in a byte the first is the low one."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    packed = codes.view(torch.uint8).int()
    return torch.stack((table[packed & 15], table[packed >> 4]), -1).flatten(-2)


def read_scales(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """(rows, blocks) as float64: where the published order of 32 x 4 x 4 tiles has the scale of a row and a block."""
    columns = (blocks + 3) // 4 * 4
    assert scale.is_contiguous()
    assert scale.numel() == (rows + 127) // 128 * 128 * columns
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    at = ((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    codes = scale.view(torch.uint8).flatten()[at]
    if scale.dtype == torch.float8_e8m0fnu:
        return torch.exp2(codes.double() - 127)
    return codes.view(torch.float8_e4m3fn).double()


def read_operand(codes: Tensor, scales: list[Tensor], block: int) -> Tensor:
    values = read_codes(codes)
    scale = read_scales(scales[0], values.shape[0], -(-values.shape[1] // block))
    return values * scale.repeat_interleave(block, 1)[:, : values.shape[1]]


class Library:
    """Stands where the library's two entries are, and multiplies what they are called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operands: list[Tensor] = []
        monkeypatch.setattr(gemm_module, "scaled_mm", self.mxfp8)
        monkeypatch.setattr(gemm_module, "scaled_mm_by_recipe", self.nvfp4)

    def mxfp8(
        self,
        left: Tensor,
        right: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        *,
        out_dtype: torch.dtype,
        **_: Any,
    ) -> Tensor:
        return self.multiply(left, right, [scale_a], [scale_b], 32).to(out_dtype)

    def nvfp4(self, left: Tensor, right: Tensor, a: list[Tensor], *arguments: Any) -> Tensor:
        return self.multiply(left, right, a, arguments[2], 16).to(arguments[-1])

    def multiply(
        self, left: Tensor, right: Tensor, scale_a: list[Tensor], scale_b: list[Tensor], block: int
    ) -> Tensor:
        factor = torch.ones((), dtype=torch.float64)
        values = []
        for codes, scales in ((left, scale_a), (right.t(), scale_b)):
            for scale in scales[1:]:
                factor = factor * scale.double()
            self.operands.append(codes)
            values.append(read_operand(codes, scales, block))
        return values[0] @ values[1].t() * factor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_the_library_gets_is_what_emulation_multiplies(
    name: str, kind: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = operands(name, kind, *shape)
    rows, columns = result_size(kind, *shape)
    a, b = (q._native_operand(buffers, columnwise) for q, buffers, columnwise in sides)
    library = Library(monkeypatch)
    out = gemm_module.multiply_native(a, b, None, torch.float32, rows, columns, False)
    (lq, left, _), (rq, right, _) = sides
    emulated = gemm_module.gemm(kind, left, lq, right, rq, None, torch.float32, rows, columns, False, True)
    decoded = [q._gemm_operand(reference, buffers, way, torch.float32) for q, buffers, way in sides]
    sizes = [one.values.abs() * (1.0 if one.scale is None else one.scale) for one in decoded]
    depth = min(size.shape[1] for size in sizes)
    magnitude = sizes[0][:rows, :depth] @ sizes[1][:columns, :depth].t()
    assert out.shape == (rows, columns)
    assert_within_magnitude(out, emulated.double(), magnitude.double() + 1e-30, 2.0**-20)
    if shape == SHAPES[1]:  # aligned codes are read where they lie, but for MXFP8's column-wise ones
        for codes, (_, buffers, columnwise) in zip(library.operands, sides):
            copied = codes.data_ptr() != buffers[0].data_ptr()
            assert copied == (columnwise and name.startswith("mxfp8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_is_added_in_the_dtype_of_the_result(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (q._native_operand(buffers, way) for q, buffers, way in operands("nvfp4", "fprop", 33, 24, 72))
    Library(monkeypatch)
    bias = torch.linspace(-1, 1, 24)
    plain, out = (gemm_module.multiply_native(a, b, x, dtype, 33, 24, False) for x in (None, bias))
    assert torch.equal(out, plain + bias.to(dtype))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_newer_gpus_take_the_library(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[torch.device] = []

    def entry(
        a: Tensor, b: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None, **_: object
    ) -> Tensor:
        called.append(a.device)
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or arguments[-1])

    for one in ("scaled_mm", "scaled_mm_by_recipe"):
        monkeypatch.setattr(gemm_module, one, entry)
    (lq, left, _), (rq, right, _) = operands(name, "fprop", 64, 32, 96)
    arguments = rq, None, torch.bfloat16, 64, 32, False
    with FakeTensorMode(allow_non_fake_inputs=True):
        left, right = ([torch.empty_like(t, device="cuda") for t in buffers] for buffers in (left, right))
        out = gemm_module._gemm("fprop", left, lq, right, *arguments, False)
    assert [device.type for device in called] == ["cuda"]
    assert (tuple(out.shape), out.dtype) == ((64, 32), torch.bfloat16)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)], indirect=True)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_older_gpus_say_how_to_emulate(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("scaled_mm", "scaled_mm_by_recipe"):
        monkeypatch.delattr(gemm_module, one)
    (lq, left, _), (rq, right, _) = operands(name, "fprop", 64, 32, 96)
    with FakeTensorMode(allow_non_fake_inputs=True):
        left, right = ([torch.empty_like(t, device="cuda") for t in buffers] for buffers in (left, right))
        with pytest.raises(RuntimeError, match="no native GEMM .*emulate=True"):
            gemm_module._gemm("fprop", left, lq, right, rq, None, torch.bfloat16, 64, 32, False, False)


def test_formats_that_the_library_lacks() -> None:
    def native(quantizer: nc.Quantizer) -> object:
        return quantizer._native_operand(quantizer.quantize(torch.ones(32, 64)).rowwise_operand(), False)

    assert native(nc.NVFP4Quantizer(row_scaled_nvfp4=True)) is None
    assert native(nc.MXFP4Quantizer()) is None


def test_compiled_graphs_keep_these_products_whole() -> None:
    for name, inlined in (("mxfp8", False), ("nvfp4", False)):
        (lq, left, _), (rq, right, _) = operands(name, "fprop", 32, 32, 32)
        rest = (rq, None, torch.bfloat16, 32, 32, False, False)
        assert gemm_module._is_library_gemm("fprop", left, lq, right, *rest) is inlined
    quantizer = nc.Float8CurrentScalingQuantizer(E4M3)
    made = quantizer.quantize(torch.ones(32, 32)).rowwise_operand()
    assert gemm_module._is_library_gemm("fprop", made, quantizer, made, quantizer, False)


@pytest.mark.parametrize(
    ("capability", "mxfp8", "nvfp4"),
    [
        ((0, 0), False, False),
        ((9, 0), False, False),
        ((10, 0), True, True),
        ((10, 3), True, True),
        ((12, 0), False, True),
    ],
    indirect=["capability"],
)
def test_the_capability_decides(capability: tuple[int, int], mxfp8: bool, nvfp4: bool) -> None:
    assert (nc.is_mxfp8_available(), nc.is_nvfp4_available()) == (mxfp8, nvfp4)
    for available, found in ((nc.is_mxfp8_available, mxfp8), (nc.is_nvfp4_available, nvfp4)):
        assert bool(available(return_reason=True)[1]) is not found
        with pytest.raises(TypeError, match="^return_reason is 'reason', of type str; use True or False$"):
            available("reason")
