"""Grouped FP8 GEMMs: the kernels against the reference, on operands that the grouped quantize functions made."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from reference import grouped_gemm
from torch import Tensor

import narrowcast as nc
from narrowcast import functional, kernels
from narrowcast.testing import assert_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPLITS = ([5], [0, 40, 3], [130, 0, 7, 20], [16, 16, 16, 0])
SIZES = ((130, 72), (48, 40), (16, 136), (256, 130))  # K, N
CASES = [(splits, *sizes) for splits, sizes in zip(SPLITS, SIZES, strict=True)]

if kernels.AVAILABLE:
    from narrowcast.kernels import grouped_gemm as kernel


def codes(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scales(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def padded(sizes: list[int], alignment: int) -> list[int]:
    return [-(-size // alignment) * alignment for size in sizes]


def moved(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    exact = "fp32_sum_order" if actual.dtype == torch.float32 else "bf16_output"
    assert_close(actual, expected, "fast_accumulation" if actual.is_cuda else exact)


@pytest.mark.parametrize(("splits", "K", "N"), CASES, ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "1x128", "128x128"])
def test_rows(splits: list[int], K: int, N: int, scaling: str, device: torch.device) -> None:
    groups, alignment = len(splits), 1 if scaling == "tensor" else 128
    total = sum(padded(splits, alignment))
    rows = sum(splits) + 6
    block = 128 if scaling == "128x128" else 1
    blocks = -(-K // 128)
    arguments = {
        "left": codes((max(total, rows), K), 0, torch.float8_e5m2 if N == 72 else torch.float8_e4m3fn),
        "right": codes((groups, N, K), 1),
        "left_scale": scales((groups,), 2)
        if scaling == "tensor"
        else scales((blocks, max(total, rows)), 2).t(),
        "right_scale": scales((groups,), 3)
        if scaling == "tensor"
        else scales((groups, -(-N // block), blocks), 3),
        "splits": torch.tensor(splits),
        "bias": None if K == 48 else scales((groups, N), 4).to(torch.bfloat16),
    }
    options = {
        "left_block": 1,
        "right_block": block,
        "alignment": alignment,
        "dtype": DTYPES[(groups + K) % 3],
        "rows": rows,
        "columns": N,
    }
    expected = grouped_gemm.rows(**arguments, **options)
    for fast in (False, True) if scaling == "tensor" else (False,):
        actual = kernel.rows(**moved(arguments, device), **options, fast_accumulation=fast)
        assert_near(actual, expected)
        assert (actual[sum(splits) :] == 0).all()


@pytest.mark.parametrize(("splits", "K", "N"), CASES, ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "1x128"])
def test_contraction(splits: list[int], K: int, N: int, scaling: str, device: torch.device) -> None:
    groups, alignment = len(splits), 16 if scaling == "tensor" else 128
    length = sum(padded(splits, alignment)) + alignment
    inside = torch.zeros(length, dtype=torch.bool)
    start = 0
    for size in splits:
        inside[start : start + size] = True
        start += padded([size], alignment)[0]

    def zeroed(data: Tensor) -> Tensor:
        return torch.where(inside, data.float(), torch.zeros(())).to(data.dtype)

    blocks = length // 128
    arguments = {
        "left": zeroed(codes((N, length), 0, torch.float8_e5m2)),
        "right": zeroed(codes((K, length), 1)),
        "left_scale": scales((groups,), 2) if scaling == "tensor" else scales((blocks, N), 2).t(),
        "right_scale": scales((groups,), 3) if scaling == "tensor" else scales((blocks, K), 3).t(),
        "splits": torch.tensor(splits, dtype=torch.int32),
    }
    options = {"left_block": 1, "right_block": 1, "alignment": alignment, "dtype": DTYPES[(groups + N) % 3]}
    expected = grouped_gemm.contraction(**arguments, **options)
    actual = kernel.contraction(**moved(arguments, device), **options)
    assert_near(actual, expected)
    for group, size in enumerate(splits):
        assert (size > 0) == bool(actual[group].any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["zeros", "bias"])
def test_finish_rows(dtype: torch.dtype, with_bias: bool, device: torch.device) -> None:
    splits, N = [3, 0, 20], 70
    out = torch.randn(40, N, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.randn(3, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = out.clone()
    expected[23:] = 0
    if with_bias:
        expected[:23] += bias.repeat_interleave(torch.tensor(splits), 0)
    actual = out.to(device)
    kernel.finish_rows_(actual, torch.tensor(splits, device=device), bias.to(device) if with_bias else None)
    assert torch.equal(actual.cpu(), expected)


def test_refuses(device: torch.device) -> None:
    left, right, scale = (
        codes((4, 32), 0).to(device),
        codes((1, 8, 32), 1).to(device),
        torch.ones(1, device=device),
    )
    options = {"left_block": 1, "right_block": 1, "alignment": 1, "dtype": torch.bfloat16, "rows": 4}
    splits = torch.tensor([4], device=device)
    with pytest.raises(ValueError, match="left is torch.float32"):
        kernel.rows(left.float(), scale, right, scale, splits, None, columns=8, **options)
    with pytest.raises(ValueError, match="at least 9 rows"):
        kernel.rows(left, scale, right, scale, splits, None, columns=9, **options)
    with pytest.raises(ValueError, match="one length"):
        kernel.contraction(
            left,
            scale,
            codes((4, 16), 0).to(device),
            scale,
            splits,
            left_block=1,
            right_block=1,
            alignment=16,
            dtype=torch.bfloat16,
        )


E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2


def block(dim: int) -> nc.Quantizer:
    return nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


QUANTIZERS = {  # of input, weight and grad_output
    "tensor": tuple(nc.Float8CurrentScalingQuantizer(element) for element in (E4M3, E4M3, E5M2)),
    "block": (block(1), block(2), block(1)),
    "block 1d": (block(1), block(1), block(1)),
    "block 2d inputs": (block(2), block(2), block(2)),
}


@pytest.mark.parametrize("splits", [[24, 0, 9], [130, 20, 5]], ids=str)
@pytest.mark.parametrize("scaling", QUANTIZERS)
def test_native_equals_decoded(splits: list[int], scaling: str, device: torch.device) -> None:
    """What the operator hands the kernels is what it decodes."""
    module = importlib.import_module("narrowcast.functional.grouped_gemm")
    K, N, rows, groups = 48, 144, sum(splits) + 4, len(splits)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, n, generator=generator).bfloat16().to(device) for n in (K, N))
    w = [torch.randn(N, K, generator=generator).bfloat16().to(device) for _ in splits]
    bias = torch.randn(groups, N, generator=generator).bfloat16().to(device)
    group_sizes = torch.tensor(splits, device=device)
    layout = "tensor" if scaling == "tensor" else "padded"
    quantizers = QUANTIZERS[scaling]
    made = (
        functional.grouped_quantize(x, group_sizes, quantizers[0], layout),
        functional.grouped_quantize_weights(w, quantizers[1], layout),
        functional.grouped_quantize(dy, group_sizes, quantizers[2], layout),
    )
    for kind, (left, right), (a, b) in (
        ("fprop", (0, 1), (False, False)), ("dgrad", (2, 1), (False, True)), ("wgrad", (2, 0), (True, True)),
    ):  # fmt: skip
        operands = [
            functional.operand_of(made[index], layout, columnwise)
            for index, columnwise in ((left, a), (right, b))
        ]
        biases = [bias] if kind == "fprop" else []
        sizes = (rows, N, K)
        native = module._multiply_native(
            kind,
            module._Operand(operands[0], quantizers[left], layout, torch.bfloat16),
            module._Operand(operands[1], quantizers[right], layout, torch.bfloat16),
            group_sizes,
            bias if biases else None,
            torch.float32,
            module._Sizes(*sizes),
            fast_accumulation=False,
        )
        decoded = functional.grouped_gemm(
            kind, operands[0], quantizers[left], layout, torch.bfloat16, operands[1], quantizers[right], layout,
            torch.bfloat16, group_sizes, biases, torch.float32, *sizes, False, True,
        )  # fmt: skip
        assert_near(native, decoded)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [208, 344])  # in wide tiles, and where narrow ones waste less
@pytest.mark.parametrize("splits", [[130, 0, 77, 300], [1000, 3, 0, 512, 129], [0, 0]], ids=str)
def test_warps_of_two_kinds_add_up_in_the_same_order(
    splits: list[int], N: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's kernel gives the bits of the general one: any format, scaling and accumulation, rows left over."""
    groups, K = len(splits), 368
    rows, starts = sum(splits) + 40, padded(splits, 128)
    length = sum(starts) + 128
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inside = torch.zeros(length, dtype=torch.bool, device=device)
    for start, size in zip([sum(starts[:group]) for group in range(groups)], splits, strict=True):
        inside[start : start + size] = True
    group_sizes = torch.tensor(splits, device=device)
    used = []
    general = kernel._faster
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scaled in (False, True):
            whole = max(rows, length) if scaled else rows
            left, right = random(whole, K).to(dtype), random(groups, N, K).to(torch.float8_e4m3fn)
            a, b = (torch.where(inside, random(n, length), torch.zeros(())).to(dtype) for n in (N, K))
            of_rows = (
                (random(3, whole).t(), random(groups, -(-N // 128), 3))
                if scaled
                else (random(groups), random(groups))
            )
            of_columns = (
                (random(length // 128, N).t(), random(length // 128, K).t())
                if scaled
                else (random(groups), random(groups))
            )
            bias = random(groups, N)
            for out, fast in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
                if fast and scaled:
                    continue
                results = []
                for faster in (general, lambda *_: None):
                    monkeypatch.setattr(kernel, "_faster", faster)
                    blocks = (1, 128) if scaled else None
                    used.append(faster(left, right, of_rows[1], N, 128, blocks) is not None)
                    common: dict[str, Any] = {"dtype": out, "fast_accumulation": fast}
                    results.append(
                        (
                            kernel.rows(
                                left, of_rows[0], right, of_rows[1], group_sizes, bias, left_block=1,
                                right_block=128 if scaled else 1, alignment=128 if scaled else 1, rows=rows, columns=N,
                                **common,
                            ),
                            kernel.contraction(
                                a, of_columns[0], b, of_columns[1], group_sizes, left_block=1, right_block=1,
                                alignment=128, **common,
                            ),
                        )
                    )  # fmt: skip
                for actual, expected in zip(*results, strict=True):
                    assert torch.equal(actual, expected), (dtype, scaled, out, fast)
    assert any(used) == (torch.cuda.get_device_capability(device)[0] == 9)


def test_one_matrix_holds_all_groups() -> None:
    """Which the loads need: below each other, or beside each other where no step reads of two groups."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper.tma", reason="needs Gluon")
    from narrowcast.kernels import grouped_hopper as hopper

    below, beside = codes((3, 20, 48), 0), codes((20, 3, 128), 1).transpose(0, 1)
    for right, shape in ((below, [60, 48]), (beside[..., :100], [20, 2 * 128 + 100])):
        matrix = hopper._matrix_of(right)
        assert matrix is not None and matrix[0] == shape
        held = right.as_strided(shape, (right.stride(1), 1)).float()
        for group, own in enumerate(right):
            row, column = group * matrix[1], group * matrix[2]
            assert torch.equal(held[row : row + 20, column : column + own.shape[1]], own.float())
    assert hopper._matrix_of(codes((20, 3, 48), 1).transpose(0, 1)) is None
    left, narrow, one = codes((8, 48), 2), codes((8, 40), 2), torch.ones(1)
    assert hopper.takes(left, below, one, 16, 1, None) and not hopper.takes(left, below, one, 20, 1, None)
    assert not hopper.takes(left, below, one, 16, 1, (1, 1))
    assert not hopper.takes(narrow, below, one, 16, 1, None)
    assert not hopper.takes(left[:0], below, one, 16, 1, None)
    assert hopper.takes(left, left, one, 8, 128, None) and not hopper.takes(left, left, one, 8, 16, None)
    of_columns = torch.ones(1, 8)  # as the copy engine reads them, and as it does not
    assert hopper.takes(left, left, of_columns.t(), 8, 128, (1, 1))
    assert not hopper.takes(left, left, torch.ones(8, 2), 8, 128, (1, 1))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from narrowcast.kernels import grouped_hopper as hopper
kernel = hopper._grouped_hopper_kernel
at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
for contraction, (height, width, stagings), stages, rank, scaled, promoted in (
    (False, hopper.BLOCK_ROWS_TILE, 6, 0, True, True), (True, hopper.BLOCK_CONTRACTION_TILE, 3, 0, True, True),
    (False, hopper.TILE, 4, 16, False, True), (False, hopper.NARROW_TILE, 6, 0, False, False),
):
    constants = dict(RANK=rank, CONTRACTION=contraction, COVERED=contraction, BLOCK_SCALED=scaled,
                     PROMOTED=promoted, BIAS=False, ALIGNMENT=128,
                     TILE_M=height, TILE_N=width, TILE_K=128, STAGES=stages, BAND=8, WIDTH=128, STAGINGS=stagings,
                     left_scale_row=1, **{"right_scale_row" if contraction else "right_scale_step": 1})
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | dict(
        thin_left_ptr="*bf16", thin_right_ptr="*bf16",
        out_ptr="*bf16", bias_ptr="*bf16", splits_ptr="*i64", left_scale_ptr="*fp32", right_scale_ptr="*fp32",
        out=f"tensordesc<bf16[{height // 2},128],{hopper.RESULTS[16]!r}>",
        left=f"tensordesc<fp8e5[{height},128],{hopper.CODES!r}>",
        right=f"tensordesc<fp8e4nv[{width},128],{hopper.CODES!r}>",
        scales=f"tensordesc<fp32[{width}],{hopper.SCALES!r}>")
    whole = ("out_ptr", "rows", "M", "N", "K", "right_rows", "left_scale_step")
    source = GluonASTSource(kernel, signature, {at[name]: value for name, value in constants.items()},
                            {at[name]: [["tt.divisibility", 16]] for name in whole})
    options = dict(num_warps=4, enable_fp_fusion=False)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and compiled.metadata.shared <= 232448, compiled.metadata.shared
    spills = compiled.asm["sass"].count("STL")
    assert spills < 16, spills  # of what is needed between the loops; 64 partial sums of a thread are not among them
"""


def test_hopper_kernel_compiles_without_a_gpu() -> None:
    """Its language is Triton's experimental one: what changes there is seen here."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper.tma", reason="needs Gluon")
    # in a process of its own, for the interpreter leaves its marks on Triton's functions
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
