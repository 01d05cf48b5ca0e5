"""The three GEMMs of a linear layer in FP8 against bf16, and weight gradients that accumulate.

Every contender is first compared with the bf16 product on a ragged and an even shape. Then the contenders of a shape
are timed in turns over a ring of random operands larger than the cache; quantizing is not part of the time.
`TFLOP/s` counts 2 x tokens x in x out; `vs_bf16` is the time of the bf16 product of the same kind over the contender's.
With --sweep, other tile shapes are timed for the Triton GEMM.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from harness import Row, parser, report, ring, runs_on_gpu, spread, time_in_turns
from torch import Tensor

import narrowcast as nc
from narrowcast import functional, kernels
from narrowcast.testing import assert_close

if kernels.AVAILABLE:
    from narrowcast.kernels import gemm as triton_gemm
    from narrowcast.kernels.launch import Launcher

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
SHAPES = tuple(
    (tokens, in_features, out_features)
    for tokens in (8192, 16384)
    for in_features, out_features in ((4096, 4096), (4096, 14336))
)
CHECKED_SHAPES = ((1000, 520, 264), (1024, 512, 384))
COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def block(dim: int) -> nc.Quantizer:
    return nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


QUANTIZERS = {  # of input, weight and grad_output
    "per-tensor": tuple(nc.Float8CurrentScalingQuantizer(element) for element in (E4M3, E4M3, E5M2)),
    "128-block": (block(1), block(2), block(1)),
}


class Operands(NamedTuple):
    """What one step of a layer multiplies; the storages hold both directions."""

    x: Tensor
    w: Tensor
    dy: Tensor
    quantized: dict[str, tuple[Any, Any, Any]]
    main_grad: Tensor
    bias: Tensor


def operands(shape: tuple[int, int, int]) -> tuple[Tensor, Operands]:
    """One set of contenders' arguments, headed by a tensor that the ring can be sized by."""
    tokens, in_features, out_features = shape
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    tensors = [
        torch.randn(tokens, in_features, **make),
        torch.randn(out_features, in_features, **make),
        torch.randn(tokens, out_features, **make),
    ]
    quantized = {
        name: tuple(q.replace(internal=True).quantize(t) for q, t in zip(quantizers, tensors, strict=True))
        for name, quantizers in QUANTIZERS.items()
    }
    x, w, dy = tensors
    main_grad = torch.zeros(out_features, in_features, device="cuda")
    return x, Operands(x, w, dy, quantized, main_grad, torch.randn(out_features, **make))  # type: ignore[arg-type]


def pair(kind: str, case: Operands, scaling: str) -> tuple[list[Tensor], Any, list[Tensor], Any]:
    """Left and right operand of a GEMM, with their quantizers."""
    x, w, dy = case.quantized[scaling]
    left, right = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[kind]
    buffers = [
        storage.columnwise_operand() if columnwise else storage.rowwise_operand()
        for storage, columnwise in zip((left, right), COLUMNWISE[kind], strict=True)
    ]
    return buffers[0], left._quantizer, buffers[1], right._quantizer


def result_shape(kind: str, case: Operands) -> tuple[int, int]:
    tokens, in_features = case.x.shape
    out_features = case.w.shape[0]
    return {"fprop": (tokens, out_features), "dgrad": (tokens, in_features), "wgrad": (out_features, in_features)}[
        kind
    ]  # fmt: skip


def bf16(kind: str, case: Operands) -> Tensor:
    if kind == "fprop":
        return torch.mm(case.x, case.w.t())
    return torch.mm(case.dy, case.w) if kind == "dgrad" else torch.mm(case.dy.t(), case.x)


Contender = Callable[[Tensor, Operands], Any]


def products(kind: str) -> dict[str, Contender]:
    """Contenders that return the product in bf16."""

    def quantized(scaling: str, fast: bool, with_bias: bool = False) -> Contender:
        return lambda _, case: functional.gemm(
            kind,
            *pair(kind, case, scaling),
            case.bias if with_bias else None,
            torch.bfloat16,
            *result_shape(kind, case),
            fast,
            False,
        )

    table: dict[str, Contender] = {
        "bf16": lambda _, case: bf16(kind, case),
        "per-tensor, fast": quantized("per-tensor", True),
        "per-tensor": quantized("per-tensor", False),
        "128-block": quantized("128-block", False),
    }
    if kind == "fprop":
        table["per-tensor + bias"] = quantized("per-tensor", False, True)
        table["128-block + bias"] = quantized("128-block", False, True)
    return table


def accumulations() -> dict[str, Contender]:
    """Contenders that add the weight gradient to the fp32 ``main_grad``."""

    def library(scaling: str, fast: bool) -> Contender:
        return lambda _, case: functional.gemm_accumulate_(
            "wgrad", case.main_grad, *pair("wgrad", case, scaling), fast, False
        )

    return {
        "bf16, addmm to fp32": lambda _, case: torch.addmm(
            case.main_grad, case.dy.t(), case.x, out_dtype=torch.float32, out=case.main_grad
        ),
        "bf16, fp32 product + add_": lambda _, case: case.main_grad.add_(
            torch.mm(case.dy.t(), case.x, out_dtype=torch.float32)
        ),
        "per-tensor, scaled_mm + add_": library("per-tensor", False),
        "per-tensor, fast, scaled_mm + add_": library("per-tensor", True),
        "128-block, scaled_mm + add_": library("128-block", False),
        "per-tensor, Triton": in_kernel("per-tensor", False),
        "per-tensor, fast, Triton": in_kernel("per-tensor", True),
        "128-block, Triton": in_kernel("128-block", False),
    }


def in_kernel(scaling: str, fast: bool) -> Contender:
    """The Triton GEMM with the accumulating epilogue."""

    def run(_: Tensor, case: Operands) -> None:
        left, left_quantizer, right, right_quantizer = pair("wgrad", case, scaling)
        a = left_quantizer._native_operand(left, True)
        b = right_quantizer._native_operand(right, True)
        accumulate = triton_gemm.accumulate_ if scaling == "per-tensor" else triton_gemm.accumulate_block_
        accumulate(case.main_grad, a.data, a.scale, b.data, b.scale, fast_accumulation=fast)

    return run


@contextmanager
def attributes(module: Any, **values: Any) -> Iterator[None]:
    """The module with other attributes."""
    saved = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def with_settings(run: Contender, values: dict[str, Any]) -> Contender:
    """The contender with other attributes of the Triton GEMM's module."""

    def changed(x: Tensor, case: Operands) -> None:
        with attributes(triton_gemm, **values):
            run(x, case)

    return changed


def sweep() -> dict[str, Contender]:
    """The Triton GEMM with other tiles, warps and stages."""
    table: dict[str, Contender] = {}
    for m, n, warps, stages in (
        (128, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 5), (128, 256, 8, 3), (256, 128, 8, 3), (64, 256, 4, 4),
    ):  # fmt: skip
        for scaling, fast in (("per-tensor", False), ("per-tensor", True), ("128-block", False)):
            name = "_accumulate" if scaling == "per-tensor" else "_accumulate_block"
            kernel = getattr(triton_gemm, name).kernel
            values = {
                "TILE_M": m,
                "TILE_N": n,
                "FAST_TILE_N": n,
                name: Launcher(kernel, num_warps=warps, num_stages=stages),
            }

            label = f"{scaling}{', fast' if fast else ''}, Triton {m}x{n} w{warps} s{stages}"
            table[label] = with_settings(in_kernel(scaling, fast), values)
    return table


def gate(table: dict[str, Contender]) -> None:
    """Fail if a contender's product is not the bf16 one within the error of the format."""
    for shape in CHECKED_SHAPES:
        x, case = operands(shape)
        for kind in COLUMNWISE:
            expected = bf16(kind, case).float()
            for name, run in products(kind).items():
                biased = expected + case.bias.float() if name.endswith("bias") else expected
                assert_close(run(x, case), biased, "fp8_layer")
        expected = bf16("wgrad", case).float() + 1.0
        for run in table.values():
            case.main_grad.fill_(1.0)
            run(x, case)
            assert_close(case.main_grad, expected, "fp8_layer")
    print(f"correct: every product equals bf16's on {CHECKED_SHAPES} within the tolerance of an FP8 layer")


def measure(chosen: Namespace) -> list[Row]:
    accumulating = accumulations() | (sweep() if chosen.sweep else {})
    if not chosen.skip_gate:
        gate(accumulating)
    rows: list[Row] = []
    for shape in SHAPES[: chosen.shapes]:
        inputs = ring(lambda shape=shape: operands(shape))
        tables = {kind: products(kind) for kind in COLUMNWISE}
        for kind, table in (*tables.items(), ("wgrad, accumulated", accumulating)):
            kept = {
                name: run for name, run in table.items() if chosen.only in name or name.startswith("bf16")
            }
            rows += summarize(shape, kind, time_in_turns(kept, inputs, chosen.repeats))
        del inputs
        torch.cuda.empty_cache()
    return rows


def summarize(shape: tuple[int, int, int], kind: str, times: dict[str, list[float]]) -> list[Row]:
    """One row per contender from microseconds per launch; the first is the bf16 product."""
    tokens, in_features, out_features = shape
    baseline = statistics.median(next(iter(times.values())))
    rows: list[Row] = []
    for name, values in times.items():
        median = statistics.median(values)
        row: Row = {"shape": f"{tokens}x{in_features}x{out_features}", "gemm": kind, "contender": name}
        row |= {key: round(float(str(value)), 2) for key, value in spread(values, "us").items()}
        row["TFLOP/s"] = round(2 * tokens * in_features * out_features / (median * 1e6), 1)
        row["vs_bf16"] = round(baseline / median, 2)
        rows.append(row)
    return rows


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--sweep", action="store_true", help="time other tile shapes of the Triton GEMM too")
    chosen = flags.parse_args()
    if runs_on_gpu(chosen):
        torch.manual_seed(0)
        report("gemm", measure(chosen), chosen)


if __name__ == "__main__":
    main()
