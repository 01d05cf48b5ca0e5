"""The GEMM operator against the golden products, and its padding, bias and errors."""

from __future__ import annotations

import golden_vectors
import pytest
import torch
from recipes import E4M3, E5M2
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.testing import aliased, assert_within_magnitude

Quantizers = tuple[nc.Quantizer, nc.Quantizer, nc.Quantizer]


def block(dim: int, power_2: bool) -> nc.Quantizer:
    return nc.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, force_pow_2_scales=power_2, block_scaling_dim=dim
    )


QUANTIZERS: dict[str, Quantizers] = {  # x, w, dy
    "gemm_fp8_current_hybrid": (
        nc.Float8CurrentScalingQuantizer(E4M3),
        nc.Float8CurrentScalingQuantizer(E4M3),
        nc.Float8CurrentScalingQuantizer(E5M2),
    ),
    "gemm_mxfp8": (nc.MXFP8Quantizer(E4M3),) * 3,
    "gemm_mxfp8_w2d": (
        nc.MXFP8Quantizer(E4M3),
        nc.MXFP8Quantizer(E4M3, with_2d_quantization=True),
        nc.MXFP8Quantizer(E4M3),
    ),
    "gemm_fp8_block_pow2": (block(1, True), block(2, True), block(1, True)),
    "gemm_fp8_block_fp32": (block(1, False), block(2, False), block(1, False)),
    "gemm_nvfp4_plain": (nc.NVFP4Quantizer(),) * 3,
    "gemm_nvfp4_default_nosr": (
        nc.NVFP4Quantizer(with_rht=True),
        nc.NVFP4Quantizer(with_2d_quantization=True),
        nc.NVFP4Quantizer(with_rht=True),
    ),
    "gemm_nvfp4_rowscaled": (
        nc.NVFP4Quantizer(row_scaled_nvfp4=True),
        nc.NVFP4Quantizer(with_2d_quantization=True),
        nc.NVFP4Quantizer(),
    ),
}
SUM_ORDER = 2.0**-20


def multiply(
    kind: str,
    left: nc.QuantizedTensorStorage,
    right: nc.QuantizedTensorStorage,
    rows: int,
    columns: int,
    **options: object,
) -> Tensor:
    left_columns, right_columns = {"fprop": (0, 0), "dgrad": (0, 1), "wgrad": (1, 1)}[kind]
    return functional.gemm(
        kind,
        left.columnwise_operand() if left_columns else left.rowwise_operand(),
        left._quantizer,
        right.columnwise_operand() if right_columns else right.rowwise_operand(),
        right._quantizer,
        options.get("bias"),
        options.get("dtype", torch.float32),
        rows,
        columns,
        options.get("fast", False),
        options.get("emulate", False),
    )


def check(golden: golden_vectors.Golden, x: object, w: object, dy: object) -> None:
    (m, n), k = golden["dy"].shape, golden["x"].shape[1]
    for kind, left, right, sizes, key in (
        ("fprop", x, w, (m, n), "y"),
        ("dgrad", dy, w, (m, k), "dx"),
        ("wgrad", dy, x, (n, k), "dw"),
    ):
        out = multiply(kind, left, right, *sizes)  # type: ignore[arg-type]
        assert_within_magnitude(out, golden[key], golden[key + "_abs"], SUM_ORDER)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_golden(name: str) -> None:
    golden = golden_vectors.load(name)
    tensors = (golden.input(key) for key in ("x", "w", "dy"))
    check(
        golden,
        *(q.replace(internal=True).quantize(t) for q, t in zip(QUANTIZERS[name], tensors, strict=True)),
    )


def test_golden_delayed() -> None:
    golden = golden_vectors.load("gemm_fp8_delayed_hybrid")
    operands = []
    for key, element in (("x", E4M3), ("w", E4M3), ("dy", E5M2)):
        quantizer = nc.Float8Quantizer(golden["scale_" + key].reshape(1), torch.zeros(1), element)
        storage = quantizer.replace(internal=True).quantize(golden.input(key))
        storage._quantizer = DelayedFloat8Quantizer(element, 0)
        operands.append(storage)
    check(golden, *operands)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 5, 3), (40, 24, 1000), (0, 16, 32), (33, 130, 17)])
def test_any_size_equals_the_zero_padded_product(name: str, m: int, n: int, k: int) -> None:
    """Odd sizes give what the next aligned size gives on zero-padded operands."""
    x, w, dy = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n).bfloat16()
    quantizers = [q.replace(internal=True) for q in QUANTIZERS[name]]

    def products(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        xs, ws, gs = (q.quantize(t) for q, t in zip(quantizers, (x, w, dy), strict=True))
        rows, columns, depth = x.shape[0], w.shape[0], x.shape[1]
        return [
            multiply("fprop", xs, ws, rows, columns),
            multiply("dgrad", gs, ws, rows, depth),
            multiply("wgrad", gs, xs, columns, depth),
        ]

    def padded(t: Tensor) -> Tensor:
        rows, columns = (-size % 128 for size in t.shape)
        return torch.nn.functional.pad(t, (0, columns, 0, rows))

    ours, expected = products(x, w, dy), products(padded(x), padded(w), padded(dy))
    for out, reference in zip(ours, expected, strict=True):
        cut = reference[: out.shape[0], : out.shape[1]]
        torch.testing.assert_close(
            out, cut, rtol=2.0**-18, atol=2.0**-18 * float(cut.abs().max() if cut.numel() else 0)
        )


def test_bias_is_added_before_the_one_rounding() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(E4M3).replace(internal=True)
    x, w, bias = torch.randn(16, 32).bfloat16(), torch.randn(8, 32).bfloat16(), torch.randn(8).bfloat16()
    xs, ws = quantizer.quantize(x), quantizer.quantize(w)
    plain = multiply("fprop", xs, ws, 16, 8)
    out = multiply("fprop", xs, ws, 16, 8, bias=bias, dtype=torch.bfloat16)
    assert torch.equal(out, (plain + bias.float()).bfloat16())
    assert not aliased([out], [*xs.rowwise_operand(), *ws.rowwise_operand(), bias])


def test_output_does_not_alias_in_any_dtype() -> None:
    quantizer = nc.IdentityQuantizer().replace(internal=True)
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    xs, ws = quantizer.quantize(x), quantizer.quantize(w)
    out = multiply("fprop", xs, ws, 4, 3)
    torch.testing.assert_close(out, x @ w.t())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemm_mxfp8", "gemm_nvfp4_plain"])
def test_a_gpu_without_the_format_says_so(name: str) -> None:
    quantizers = [q.replace(internal=True) for q in QUANTIZERS[name]]
    x, w = torch.randn(32, 64, device="cuda").bfloat16(), torch.randn(32, 64, device="cuda").bfloat16()
    xs, ws = quantizers[0].quantize(x), quantizers[1].quantize(w)
    with pytest.raises(RuntimeError, match="emulate=True"):
        multiply("fprop", xs, ws, 32, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 48, 256), (1, 1, 1), (7, 5, 3), (1000, 130, 520), (0, 16, 32), (128, 128, 128)]
)
@pytest.mark.parametrize("name", ["gemm_fp8_current_hybrid", "gemm_fp8_block_pow2", "gemm_fp8_block_fp32"])
def test_native_equals_the_cpu(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Tensor cores against the reference on the same bytes, all three GEMMs, with and without bias."""
    x, w, dy = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n).bfloat16()
    bias = torch.randn(n).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        xs, ws, gs = (
            q.replace(internal=True).quantize(t.to(device))
            for q, t in zip(QUANTIZERS[name], (x, w, dy), strict=True)
        )
        results.append(
            [
                multiply("fprop", xs, ws, m, n, dtype=dtype),
                multiply("fprop", xs, ws, m, n, dtype=dtype, bias=bias.to(device)),
                multiply("dgrad", gs, ws, m, k, dtype=dtype),
                multiply("wgrad", gs, xs, n, k, dtype=dtype),
            ]
        )
    magnitude = [x.abs().float() @ w.abs().float().t()] * 2
    magnitude += [dy.abs().float() @ w.abs().float(), dy.abs().float().t() @ x.abs().float()]
    for cpu, cuda, size in zip(*results, magnitude, strict=True):
        assert_within_magnitude(cuda.cpu().float().to(dtype), cpu.float(), size * 1.2 + 1e-30, 2.0**-9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZERS)
def test_emulation_on_the_gpu_equals_the_cpu(name: str) -> None:
    m, n, k = 96, 64, 160
    x, w, dy = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        xs, ws, gs = (
            q.replace(internal=True).quantize(t.to(device))
            for q, t in zip(QUANTIZERS[name], (x, w, dy), strict=True)
        )
        results.append(
            [
                multiply("fprop", xs, ws, m, n, emulate=True),
                multiply("dgrad", gs, ws, m, k, emulate=True),
                multiply("wgrad", gs, xs, n, k, emulate=True),
            ]
        )
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-4, atol=1e-4 * float(cpu.abs().max()))
