"""The three GEMMs of a linear layer in FP8 against bf16, and weight gradients that accumulate.

Every contender is first compared with the bf16 product on a ragged and an even shape. Then the contenders of a shape
are timed in turns over a ring of random operands larger than the cache; quantizing is not part of the time.
`TFLOP/s` counts 2 x tokens x in x out; `share` is the time over that of the bf16 product of the same kind.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import Row, parser, rates, report_on_gpu, ring, time_in_turns
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.testing import assert_close

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
    }


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
    accumulating = accumulations()
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
            where: Row = {"shape": "x".join(map(str, shape)), "gemm": kind}
            rows += rates(where, time_in_turns(kept, inputs, chosen.repeats), 2 * math.prod(shape))
        del inputs
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    report_on_gpu("gemm", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
