"""The dequantize kernels: golden files, every code, ragged shapes, against the reference in every output dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E2M1, E2M3, E3M2, E4M3, E5M2

from .checks import DTYPES, SHAPES_2D, make

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
INTERPRETED_SHAPES = [(1, 1), (1, 40), (40, 1), (33, 17), (130, 68), (3, 5, 7), (2, 65, 132), (0, 8), (8, 0)]


def check(name: str, buffers: Sequence[Tensor], *arguments, device: torch.device, **options) -> Tensor:
    """Kernel on ``device`` and reference on the CPU; NaN may have other bits, as processors differ there."""
    sources = [buffer.to(device) for buffer in buffers]
    actual = getattr(kernels.dequantize, name)(*sources, *arguments, **options)
    expected = getattr(reference.dequantize, name)(*buffers, *arguments, **options).contiguous()
    assert_fresh([actual], sources)
    what = f"{name} {tuple(buffers[0].shape)} {arguments} {options}"
    assert torch.equal(actual.isnan().cpu(), expected.isnan()), what
    assert_bitwise(actual.cpu().nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), what)
    return actual


def random_codes(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Every byte, so NaN and infinities as well."""
    return torch.randint(
        0, 256, tuple(shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def random_scales(shape: Sequence[int]) -> Tensor:
    """fp32 of many magnitudes, whose products are subnormal, too large for fp16, or infinite."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-140, 120, tuple(shape), generator=generator)
    exponents = torch.where(
        torch.rand(tuple(shape), generator=generator) < 0.5, exponents % 16 - 8, exponents
    )
    return torch.rand(tuple(shape), generator=generator).add(1.0) * torch.exp2(exponents.float())


def check_float8(shape: Sequence[int], fmt, dtype: torch.dtype, device: torch.device) -> None:
    data, scale_inv = random_codes(shape), torch.tensor([0.37])
    check("float8", [data, scale_inv], fmt, dtype, device=device)
    check("float8_transpose", [random_codes((shape[-1], *shape[:-1])), scale_inv], fmt, dtype, device=device)


def check_float8_rows(shape: Sequence[int], fmt, dtype: torch.dtype, device: torch.device) -> None:
    rows = math.prod(shape[:-1])
    check("float8_rows", [random_codes(shape), random_scales((rows,))], fmt, dtype, device=device)


def check_mxfp8(shape: Sequence[int], fmt, dtype: torch.dtype, device: torch.device) -> None:
    for name, options in (("rowwise", (True, False)), ("columnwise", (False, True))):
        x = make("normal", shape, torch.float32)
        data, scale_inv = reference.mx.quantize(x, fmt, rowwise=options[0], columnwise=options[1])
        check(f"mxfp8_{name}", [data, scale_inv], fmt, dtype, device=device)
        everything = [random_codes(data.shape), random_codes(scale_inv.shape, 1)]
        check(f"mxfp8_{name}", everything, fmt, dtype, device=device)


def check_mx_packed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    for fmt in (E2M3, E3M2, E2M1):
        buffers = reference.mx.quantize(torch.zeros(shape), fmt, rowwise=True, columnwise=True)
        for name, (data, scale_inv) in (("rowwise", buffers[:2]), ("columnwise", buffers[2:])):
            everything = [random_codes(data.shape), random_codes(scale_inv.shape, 1)]
            check(f"mx_packed_{name}", everything, fmt, dtype, device=device)


def check_block(shape: Sequence[int], fmt, dtype: torch.dtype, device: torch.device) -> None:
    for two_d in (False, True):
        buffers = reference.float8_block.quantize(
            torch.zeros(shape),
            fmt,
            rowwise=True,
            columnwise=True,
            block_dim=1 + two_d,
            power_2=False,
            epsilon=0.0,
        )
        for name, (data, scale_inv) in (("rowwise", buffers[:2]), ("columnwise", buffers[2:])):
            everything = [random_codes(data.shape), random_scales(scale_inv.shape)]
            check(f"float8_block_{name}", everything, fmt, dtype, device=device, two_d=two_d)


def check_nvfp4(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    for row_scaled in (False, True):
        buffers = reference.nvfp4.quantize(
            torch.zeros(shape), rowwise=True, columnwise=True, row_scaled=row_scaled
        )
        row_data, row_scale, column_data, column_scale, row_amax, column_amax = buffers
        operands = [
            random_codes(row_data.shape),
            random_codes(row_scale.shape, 1),
            random_scales(row_amax.shape),
        ]
        check("nvfp4_rowwise", operands, 448, dtype, device=device, columns=columns)
        check("nvfp4_rowwise", operands, 256, dtype, device=device, columns=2 * row_data.shape[-1])
        check(
            "nvfp4_block_scaled",
            [operands[0].view(rows, row_data.shape[-1]), operands[1]],
            dtype,
            device=device,
        )
        operands = [random_codes(column_data.shape), random_codes(column_scale.shape, 1)]
        check("nvfp4_block_scaled", operands, dtype, device=device)
        operands.append(random_scales(column_amax.shape))
        for rht, signs in ((False, True), (True, True), (True, False)):
            options = {"rows": rows, "rht": rht, "random_signs": signs}
            if rht:  # NaN and infinities differ in sign and bits, and rotation spreads them
                operands = [operands[0], operands[1].bitwise_and(0x3F), torch.rand(column_amax.shape)]
            check("nvfp4_columnwise", operands, 448, dtype, device=device, **options)
        check("nvfp4_columnwise", operands, 256, dtype, device=device, rows=2 * column_data.shape[-1])


@pytest.mark.covering
@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("check_format", [check_float8, check_float8_rows, check_mxfp8, check_block])
def test_ragged(
    check_format: Callable[..., None], fmt, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_format(shape, fmt, dtype, device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_mx_packed(shape, dtype, device)
    check_nvfp4(shape, dtype, device)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_at_every_scale(fmt, dtype: torch.dtype, device: torch.device) -> None:
    """All codes against all E8M0 codes, and against scales that make subnormals, midpoints and overflows."""
    codes = torch.arange(256, dtype=torch.uint8)
    # row r has scale codes r // 8 * 8 ... + 7 and, under each, 32 of the element codes
    data = codes.view(8, 1, 32).expand(8, 8, 32).reshape(8, 256).repeat(32, 1)
    scale_inv = codes.view(32, 8).repeat_interleave(8, 0)
    check("mxfp8_rowwise", [data, scale_inv], fmt, dtype, device=device)
    for scale in (1.0, 1 / 3, 2.0**-149, 2.0**-120, 3e38, 1.001):
        check("float8", [codes, torch.tensor([scale])], fmt, dtype, device=device)


def test_rank_one(device: torch.device) -> None:
    scale_inv = torch.tensor([0.5])
    check("float8", [random_codes((17,)), scale_inv], E4M3, torch.bfloat16, device=device)
    check("float8_transpose", [random_codes((17,)), scale_inv], E4M3, torch.bfloat16, device=device)


def test_strided_and_misaligned_buffers(device: torch.device) -> None:
    shifted = random_codes((68 * 132 + 1,)).to(device)[1:].view(68, 132)
    scale_inv = torch.tensor([0.5], device=device)
    for data in (shifted, shifted.t(), shifted[:, ::2]):
        for name in ("float8", "float8_transpose"):
            actual = getattr(kernels.dequantize, name)(data, scale_inv, E5M2, torch.float16)
            expected = getattr(reference.dequantize, name)(data.cpu(), scale_inv.cpu(), E5M2, torch.float16)
            assert torch.equal(actual.cpu().nan_to_num(), expected.nan_to_num())
    packed = random_codes((48 * 16 + 1,)).to(device)[1:].view(48, 16)
    scales = random_codes((4, 128)).to(device).bitwise_and(0x7E)[:2].t()  # strided
    amax = torch.tensor([3.0], device=device)
    actual = kernels.dequantize.nvfp4_columnwise(packed, scales, amax, 448, torch.float32, rows=30)
    expected = reference.dequantize.nvfp4_columnwise(
        packed.cpu(), scales.cpu(), amax.cpu(), 448, torch.float32, rows=30
    )
    assert_bitwise(actual, expected)


@pytest.mark.parametrize("name", golden_vectors.names("fp8_current_"))
def test_golden_per_tensor(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt, scale_inv = FORMATS[golden.meta["format"]], golden["scale_inv"]
    for kernel, data in (("float8", "rowwise_data"), ("float8_transpose", "columnwise_data")):
        values = check(kernel, [golden[data], scale_inv], fmt, torch.float32, device=device)
        assert_bitwise(values, golden["dequant"])


@pytest.mark.parametrize("name", golden_vectors.names("mxfp8_", "fp8_block_"))
def test_golden_of_blocks(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt = FORMATS["e5m2" if "e5m2" in name else "e4m3"]
    kind = "mxfp8" if name.startswith("mxfp8") else "float8_block"
    options = {} if kind == "mxfp8" else {"two_d": "_2d_" in name}
    for direction in ("rowwise", "columnwise"):
        operands = [golden[f"{direction}_data"], golden[f"{direction}_scale_inv"]]
        values = check(f"{kind}_{direction}", operands, fmt, torch.float32, device=device, **options)
        if f"{direction}_dequant" in golden:
            assert_bitwise(values.view(golden[f"{direction}_dequant"].shape), golden[f"{direction}_dequant"])


def test_refuses(device: torch.device) -> None:
    data, scale_inv = torch.zeros(4, 4, dtype=torch.uint8, device=device), torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match="cannot dequantize to torch.float64; use torch.bfloat16"):
        kernels.dequantize.float8(data, scale_inv, E4M3, torch.float64)
    with pytest.raises(ValueError, match="e2m1 is not an FP8 format"):
        kernels.dequantize.mxfp8_rowwise(data, data, E2M1, torch.float32)
    with pytest.raises(ValueError, match=r"shape \(4,\); this format needs rank 2"):
        kernels.dequantize.float8_block_rowwise(data[0], scale_inv, E4M3, torch.float32, two_d=True)


@pytest.mark.gpu
def test_every_shape(device: torch.device) -> None:
    for shape, dtype in itertools.product(SHAPES_2D, DTYPES):
        for fmt in FORMATS.values():
            check_float8(shape, fmt, dtype, device)
            check_float8_rows(shape, fmt, dtype, device)
            check_mxfp8(shape, fmt, dtype, device)
            check_block(shape, fmt, dtype, device)
        check_mx_packed(shape, dtype, device)
        check_nvfp4(shape, dtype, device)


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    rows, columns = 2**20 + 129, 2048
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    data = torch.randint(0, 120, (rows, columns), dtype=torch.uint8, device=device)
    scale_inv = torch.tensor([0.37], device=device)
    decoders: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("rows", lambda x: kernels.dequantize.float8(x, scale_inv, E4M3, torch.bfloat16)),
        ("transposed", lambda x: kernels.dequantize.float8_transpose(x, scale_inv, E4M3, torch.bfloat16)),
    ]
    for name, decode in decoders:
        values = decode(data)
        for part in (slice(0, 200), slice(-200, None)):
            expected = reference.float8.dequantize(data[part].cpu(), scale_inv.cpu(), E4M3, torch.bfloat16)
            assert_bitwise(values[part] if name == "rows" else values[:, part].t(), expected, name)
        del values


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    data = random_codes((256, 384)).to(device).bitwise_and(0x77)
    scale_inv = torch.tensor([0.5], device=device)
    expected = kernels.dequantize.float8_transpose(data, scale_inv, E4M3, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.dequantize.float8_transpose(data, scale_inv, E4M3, torch.bfloat16)
    scale_inv.mul_(2.0)
    graph.replay()
    assert torch.equal(captured, expected * 2.0)
