"""The GEMM operators against the golden products, and their padding, bias, accumulation and errors."""

from __future__ import annotations

import importlib

import golden_vectors
import pytest
import torch
from recipes import E4M3, E5M2
from torch import Tensor
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast import functional
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.testing import aliased, assert_close, assert_within_magnitude

gemm_module = importlib.import_module("narrowcast.functional.gemm")

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


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDED = {torch.float32: "fp32_sum_order", torch.bfloat16: "bf16_output", torch.float16: "bf16_output"}


def quantized(name: str, m: int, n: int, k: int, device: str = "cpu") -> list[nc.QuantizedTensorStorage]:
    """x (m, k), w (n, k) and dy (m, n), quantized."""
    tensors = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return [
        q.replace(internal=True).quantize(t.bfloat16().to(device))
        for q, t in zip(QUANTIZERS[name], tensors, strict=True)
    ]


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bias_is_added_before_the_one_rounding(
    name: str, dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    x, w, _ = quantized(name, 33, 24, 96)
    bias = torch.randn(24).to(bias_dtype)
    plain = multiply("fprop", x, w, 33, 24)
    out = multiply("fprop", x, w, 33, 24, bias=bias, dtype=dtype)
    assert torch.equal(out, (plain + bias.to(dtype).float()).to(dtype))
    assert not aliased([out], [*x.rowwise_operand(), *w.rowwise_operand(), bias])
    exact = x.dequantize(dtype=torch.float32).double() @ w.dequantize(dtype=torch.float32).double().t()
    assert_close(out, exact + bias.to(dtype).double(), ROUNDED[dtype])


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gemm_fp8_current_hybrid", "identity"])
def test_the_native_path_adds_bias_as_the_decoded_one(
    name: str, dtype: torch.dtype, bias_dtype: torch.dtype, device: torch.device
) -> None:
    """The plain product, and from torch 2.13 on the per-tensor library GEMM, run on the CPU too."""
    if name != "identity" and device.type == "cpu" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip(f"torch {torch.__version__} has no scaled_mm on the CPU")
    quantizer = nc.IdentityQuantizer() if name == "identity" else QUANTIZERS[name][0]
    x, w = (
        quantizer.replace(internal=True).quantize(torch.randn(size, 40, device=device)) for size in (33, 23)
    )
    bias = torch.randn(23, device=device).to(bias_dtype)
    a, b = (t._quantizer._native_operand(t.rowwise_operand(), False) for t in (x, w))
    out = gemm_module.multiply_native(a, b, bias, dtype, 33, 23, False)
    exact = x.dequantize(dtype=torch.float32).double() @ w.dequantize(dtype=torch.float32).double().t()
    assert out.dtype == dtype
    native_fp8 = name != "identity" and device.type == "cuda"
    assert_close(out, exact + bias.to(dtype).double(), "fast_accumulation" if native_fp8 else ROUNDED[dtype])


def accumulate(
    kind: str,
    out: Tensor,
    left: nc.QuantizedTensorStorage,
    right: nc.QuantizedTensorStorage,
    fast: bool = False,
    emulate: bool = False,
) -> None:
    left_columns, right_columns = {"fprop": (0, 0), "dgrad": (0, 1), "wgrad": (1, 1)}[kind]
    functional.gemm_accumulate_(
        kind,
        out,
        left.columnwise_operand() if left_columns else left.rowwise_operand(),
        left._quantizer,
        right.columnwise_operand() if right_columns else right.rowwise_operand(),
        right._quantizer,
        fast,
        emulate,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 5, 3), (40, 24, 136), (0, 16, 32)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_accumulation_rounds_once_after_the_sum(
    name: str, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, w, dy = quantized(name, m, n, k)
    for kind, left, right, rows, columns in (
        ("fprop", x, w, m, n),
        ("dgrad", dy, w, m, k),
        ("wgrad", dy, x, n, k),
    ):
        before = torch.randn(rows, columns).to(dtype)
        out = before.clone()
        accumulate(kind, out, left, right)
        expected = before.float() + multiply(kind, left, right, rows, columns)
        assert torch.equal(out, expected.to(dtype)), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation_into_a_part_of_a_buffer_leaves_the_rest(dtype: torch.dtype) -> None:
    x, _, dy = quantized("gemm_fp8_current_hybrid", 48, 24, 40)
    plain = torch.zeros(24, 40, dtype=dtype)
    accumulate("wgrad", plain, dy, x)
    buffer = torch.full((30, 50), 3.0, dtype=dtype)
    for whole in (buffer, buffer.t().contiguous().t()):
        part = whole[2:26, 3:43]
        part.zero_()
        accumulate("wgrad", part, dy, x)
        assert torch.equal(part, plain)
        part.fill_(3.0)
        assert bool((whole == 3.0).all())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemm_fp8_current_hybrid", "gemm_mxfp8"])
def test_compiled_accumulation_equals_eager(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    x_quantizer, _, dy_quantizer = (q.with_usage(False, True) for q in QUANTIZERS[name])

    def step(out: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        left, right = functional.quantize(dy, dy_quantizer), functional.quantize(x, x_quantizer)
        functional.gemm_accumulate_("wgrad", out, left, dy_quantizer, right, x_quantizer, False, False)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (32, 48):
        dy, x, main_grad = torch.randn(m, 24), torch.randn(m, 40), torch.randn(24, 40).to(dtype)
        ours, expected = main_grad.clone(), main_grad.clone()
        assert torch.equal(compiled(ours, dy, x), step(expected, dy, x))
        assert torch.equal(ours, expected) and not torch.equal(ours, main_grad)


@pytest.mark.parametrize(
    ("out", "named"),
    [
        (torch.zeros(24, 40, dtype=torch.float16), "out is torch.float16; accumulate into torch.float32"),
        (torch.zeros(24, 40, dtype=torch.int32), "out is torch.int32"),
        (torch.zeros(2, 12, 40), r"out has shape \(2, 12, 40\)"),
    ],
)
def test_accumulators_that_are_refused(out: Tensor, named: str) -> None:
    x, _, dy = quantized("gemm_mxfp8", 32, 24, 40)
    with pytest.raises(ValueError, match=named):
        accumulate("wgrad", out, dy, x)


ROTATED = {
    "mxfp8": nc.MXFP8Quantizer(E4M3),
    "plain": nc.NVFP4Quantizer(),
    "rotated": nc.NVFP4Quantizer(with_rht=True),
    "no signs": nc.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    "hybrid": nc.HybridQuantizer(
        rowwise_quantizer=nc.MXFP8Quantizer(E4M3), columnwise_quantizer=nc.NVFP4Quantizer(with_rht=True)
    ),
    "identity": nc.IdentityQuantizer(),
}


@pytest.mark.parametrize("rows", [1, 7, 32, 40])
@pytest.mark.parametrize("right", ROTATED)
@pytest.mark.parametrize("left", ROTATED)
def test_rotations_that_do_not_cancel_are_undone(left: str, right: str, rows: int) -> None:
    """Of the column-wise operands of wgrad, and of a weight that dgrad reads."""
    dy, x, w = torch.randn(rows, 48), torch.randn(rows, 32), torch.randn(48, 32)
    for kind, a, b, wanted in (("wgrad", dy, x, dy.t() @ x), ("dgrad", dy, w, dy @ w)):
        found = multiply(kind, ROTATED[left].quantize(a), ROTATED[right].quantize(b), *wanted.shape)
        terms = (a.t() if kind == "wgrad" else a).square() @ b.square()
        assert ((found - wanted).norm() / terms.sum().sqrt()) < 0.25


def test_an_unknown_kind_is_refused() -> None:
    x, w, _ = quantized("gemm_mxfp8", 32, 24, 40)
    with pytest.raises(ValueError, match="kind is 'forward'; use one of .*'fprop', 'dgrad', 'wgrad'"):
        functional.gemm(
            "forward",
            x.rowwise_operand(),
            x._quantizer,
            w.rowwise_operand(),
            w._quantizer,
            None,
            torch.float32,
            32,
            24,
            False,
            False,
        )


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


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gemm_fp8_current_hybrid", "gemm_fp8_block_pow2", "gemm_fp8_block_fp32"])
def test_native_bias(name: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """Per tensor the sum is rounded once; a 128-block product is rounded before the bias is added."""
    x, w, _ = quantized(name, 130, 72, 256, "cuda")
    bias = (1000 * torch.randn(72, device="cuda")).to(bias_dtype)  # two roundings would show
    out = multiply("fprop", x, w, 130, 72, bias=bias, dtype=dtype)
    if name == "gemm_fp8_current_hybrid":
        product = multiply("fprop", x, w, 130, 72)
        assert_close(out, product.double() + bias.to(dtype).double(), ROUNDED[dtype])
    else:
        product = multiply("fprop", x, w, 130, 72, dtype=dtype)
        assert torch.equal(out, product + bias.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 128, 384), (64, 48, 256), (1, 1, 1), (1000, 130, 520), (0, 16, 32)]
)
@pytest.mark.parametrize("name", ["gemm_fp8_current_hybrid", "gemm_fp8_block_pow2", "gemm_fp8_block_fp32"])
def test_native_accumulation(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, _, dy = quantized(name, m, n, k, "cuda")
    before = torch.randn(n, k, device="cuda").to(dtype)
    # the values of the column-wise codes: scales that are no powers of two round them otherwise than the row-wise ones
    values = [
        functional.dequantize(
            t.columnwise_operand(), t._quantizer, True, torch.float32, list(t.shape)
        ).double()
        for t in (dy, x)
    ]
    exact, magnitude = values[0].t() @ values[1], values[0].abs().t() @ values[1].abs()
    for fast in (False, True):
        out = before.clone()
        accumulate("wgrad", out, dy, x, fast=fast)
        share = 2.0**-7 if fast else 2.0**-9  # as TOLERANCES["fast_accumulation"]
        assert_within_magnitude(out, before.double() + exact, magnitude + 1e-30, share)


@pytest.mark.parametrize("m", [1, 32, 33])
@pytest.mark.parametrize(("k", "right_rows"), [(32, 20), (32, 32), (40, 32)])
def test_padding_copies_only_the_operand_that_needs_it(
    m: int, k: int, right_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the left operand, such as a ragged batch, may be any number."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, right_rows))
    taken: list[Tensor] = []
    really = torch._scaled_mm

    def scaled_mm(left: Tensor, right: Tensor, *arguments: object, **options: object) -> Tensor:
        taken.extend((left, right))
        return really(left, right, *arguments, **options)

    monkeypatch.setattr(gemm_module, "scaled_mm", scaled_mm)
    operand, one = gemm_module.NativeOperand, torch.ones(())
    out = gemm_module.multiply_native(
        operand(a, one, "tensor"), operand(b, one, "tensor"), None, torch.float32, m, right_rows, True
    )
    assert torch.allclose(out, a.float() @ b.float().t(), rtol=1e-5, atol=1e-5)
    assert (taken[0].data_ptr() == a.data_ptr()) == (k % 16 == 0)
    assert (taken[1].data_ptr() == b.data_ptr()) == (k % 16 == 0 and right_rows % 16 == 0)


@pytest.mark.gpu
def test_pairs_without_a_native_gemm_say_so() -> None:
    e5m2 = nc.Float8CurrentScalingQuantizer(E5M2)
    pairs = [
        (e5m2, e5m2),
        (block(2, True), block(2, True)),
        (nc.Float8CurrentScalingQuantizer(E4M3), block(1, True)),
        (nc.IdentityQuantizer(), nc.Float8CurrentScalingQuantizer(E4M3)),
    ]
    for left, right in pairs:
        x, w = (q.replace(internal=True).quantize(torch.randn(32, 64, device="cuda")) for q in (left, right))
        with pytest.raises(RuntimeError, match="emulate=True"):
            multiply("fprop", x, w, 32, 32)
        assert multiply("fprop", x, w, 32, 32, emulate=True).isfinite().all()
