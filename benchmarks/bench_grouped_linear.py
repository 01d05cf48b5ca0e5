"""Linear layers on groups of rows, as the experts of a mixture: forward and backward, and the three GEMMs alone.

`layer` rows time a step of ``GroupedLinear`` with a device tensor of splits, eager and compiled, in turns with a bf16
``grouped_mm`` under autograd, compiled; `share` is the time over that one's. Every recipe's weight gradient is first
compared with bf16's. `gemm` rows time one grouped GEMM on operands quantized before: the library's, the Triton kernel
and the loop of the library's GEMM on the same bytes, and bf16 ``grouped_mm``. Splits are equal, or skewed: half
of the groups have a tenth of the rows.
"""

from __future__ import annotations

import importlib
import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import Row, parser, report, ring, runs_on_gpu, spread, time_in_turns
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.tensors import grouped_layout
from narrowcast.testing import assert_close

grouped_gemm = importlib.import_module("narrowcast.functional.grouped_gemm")
grouped_loop = importlib.import_module("narrowcast.functional.grouped_loop")

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
RECIPES: dict[str, nc.recipe.Recipe | None] = {
    "bf16": None,
    "delayed": nc.recipe.DelayedScaling(),
    "current": nc.recipe.Float8CurrentScaling(),
    "current e4m3": nc.recipe.Float8CurrentScaling(fp8_format=nc.recipe.Format.E4M3),
    "block": nc.recipe.Float8BlockScaling(),
}
PEER = "torch: bf16 grouped_mm, compiled"


class Case(NamedTuple):
    """``groups`` layers ``in_features`` -> ``out_features`` on ``tokens`` rows together."""

    groups: int
    in_features: int
    out_features: int
    tokens: int = 16384

    def __str__(self) -> str:
        return f"{self.groups}x({self.in_features}->{self.out_features}), {self.tokens} tokens"

    @property
    def multiplications(self) -> int:
        return self.tokens * self.in_features * self.out_features


CASES = (Case(8, 4096, 14336), Case(32, 2048, 1408))


def splits_of(case: Case, skewed: bool) -> list[int]:
    """Rows of each group."""
    if not skewed:
        return [case.tokens // case.groups] * case.groups
    few = case.groups // 2
    small = case.tokens // 10 // few
    large = (case.tokens - small * few) // (case.groups - few)
    sizes = [small, large] * few
    sizes[-1] += case.tokens - sum(sizes)
    return sizes


Step = Callable[..., Any]


def peer(case: Case, dy: Tensor) -> Step:
    """A step with ``grouped_mm`` alone."""
    weight = torch.randn(case.groups, case.out_features, case.in_features, device="cuda").bfloat16()
    weight.mul_(0.02).requires_grad_()

    @torch.compile(fullgraph=True)
    def forward(x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    def step(x: Tensor, splits: Tensor) -> None:
        weight.grad = x.grad = None
        forward(x, splits.cumsum(0, dtype=torch.int32)).backward(dy)

    return step


def layer_step(layer: nc.GroupedLinear, recipe: nc.recipe.Recipe | None, dy: Tensor, compiled: bool) -> Step:
    forward = torch.compile(layer, fullgraph=True) if compiled else layer

    def step(x: Tensor, splits: Tensor) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x, splits)
        y.backward(dy)

    return step


def layer_steps(case: Case, dy: Tensor, chosen: Namespace) -> dict[str, Step]:
    layer = nc.GroupedLinear(
        case.groups,
        case.in_features,
        case.out_features,
        bias=False,
        device="cuda",
        params_dtype=torch.bfloat16,
    )
    steps: dict[str, Step] = {PEER: peer(case, dy)}
    for name, recipe in RECIPES.items():
        for compiled in (False,) if chosen.skip_compile else (False, True):
            label = f"{name}, {'compiled' if compiled else 'eager'}"
            if chosen.only in label:
                steps[label] = layer_step(layer, recipe, dy, compiled)
    return steps


def gate(case: Case) -> None:
    """Fail if a recipe's gradients are not those of bf16 within the error of an FP8 layer."""
    layer = nc.GroupedLinear(
        case.groups,
        case.in_features,
        case.out_features,
        bias=False,
        device="cuda",
        params_dtype=torch.bfloat16,
    )
    x, splits = inputs(case, True)
    dy = torch.randn(case.tokens, case.out_features, device="cuda").bfloat16()
    results: dict[str, list[Tensor]] = {}
    for name, recipe in RECIPES.items():
        step = layer_step(layer, recipe, dy, False)
        for _ in range(2):  # delayed scaling needs a step to learn its scales
            step(x, splits)
        assert x.grad is not None
        results[name] = [x.grad.float(), *(p.grad.float() for p in layer.parameters() if p.grad is not None)]
    for name, grads in results.items():
        for ours, exact in zip(grads, results["bf16"], strict=True):
            assert_close(ours, exact, "fp8_layer")
        print(f"correct: gradients of {name} on {case}")


def inputs(case: Case, skewed: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(case.tokens, case.in_features, device="cuda").bfloat16().requires_grad_()
    return x, torch.tensor(splits_of(case, skewed), device="cuda")


def block(dim: int) -> nc.Quantizer:
    return nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def per_tensor(element: Any) -> nc.Quantizer:
    return nc.Float8CurrentScalingQuantizer(element)


QUANTIZERS = {  # of input, weight and grad_output
    "per-tensor e4m3": (per_tensor(E4M3), per_tensor(E4M3), per_tensor(E4M3)),
    "per-tensor e5m2 gradient": (per_tensor(E4M3), per_tensor(E4M3), per_tensor(E5M2)),
    "128-block": (block(1), block(2), block(1)),
}
KINDS = {"fprop": (0, 1, False, False), "dgrad": (2, 1, False, True), "wgrad": (2, 0, True, True)}


class Operands(NamedTuple):
    """What one step multiplies, in bf16 and quantized in both directions."""

    tensors: tuple[Tensor, Tensor, Tensor]
    splits: Tensor
    sizes: list[int]
    quantized: dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]


def operands(case: Case, skewed: bool) -> tuple[Tensor, Operands]:
    """One set of the GEMMs' arguments, headed by a tensor that the ring can be sized by."""
    x, splits = inputs(case, skewed)
    x = x.detach()
    w = torch.randn(case.groups, case.out_features, case.in_features, device="cuda").bfloat16()
    dy = torch.randn(case.tokens, case.out_features, device="cuda").bfloat16()
    quantized = {}
    for name, (of_x, of_w, of_dy) in QUANTIZERS.items():
        layout = layout_of(name)
        quantized[name] = (
            functional.grouped_quantize(x, splits, of_x, layout),
            functional.grouped_quantize_weights([w], of_w, layout),
            functional.grouped_quantize(dy, splits, of_dy, layout),
        )
    return x, Operands((x, w, dy), splits, splits.tolist(), quantized)


def layout_of(scaling: str) -> str:
    return grouped_layout(QUANTIZERS[scaling][0]._storage_name)


@contextmanager
def multiplied_by(way: str) -> Iterator[None]:
    """Groups are multiplied by the "library" at once, by "Triton", or one by one in a "loop", whatever their sizes."""
    before = grouped_gemm.LIBRARY_PER_TENSOR, grouped_loop.PRODUCTS
    grouped_gemm.LIBRARY_PER_TENSOR = way == "library"
    grouped_loop.PRODUCTS = dict.fromkeys(grouped_loop.PRODUCTS, 0.0 if way == "loop" else math.inf)
    try:
        yield
    finally:
        grouped_gemm.LIBRARY_PER_TENSOR, grouped_loop.PRODUCTS = before


def gemms(case: Case, kind: str) -> dict[str, Step]:
    """Contenders that return the product in bf16."""
    left, right, left_columnwise, right_columnwise = KINDS[kind]

    def bf16(_: Tensor, given: Operands) -> Tensor:
        b = given.tensors[right]
        return functional.grouped_mm(kind, given.tensors[left], [b], given.splits, [], True, torch.bfloat16)

    def quantized(scaling: str, fast: bool, way: str) -> Step:
        layout, quantizers = layout_of(scaling), QUANTIZERS[scaling]

        def run(_: Tensor, given: Operands) -> Tensor:
            made = given.quantized[scaling]
            with multiplied_by(way):
                return functional.grouped_gemm(
                    kind,
                    functional.operand_of(made[left], layout, left_columnwise),
                    quantizers[left],
                    layout,
                    torch.bfloat16,
                    functional.operand_of(made[right], layout, right_columnwise),
                    quantizers[right],
                    layout,
                    torch.bfloat16,
                    given.splits,
                    [],
                    torch.bfloat16,
                    case.tokens,
                    case.out_features,
                    case.in_features,
                    given.sizes if way == "loop" else None,
                    fast,
                    False,
                )

        return run

    table: dict[str, Step] = {"bf16 grouped_mm": bf16}
    scalings = ["per-tensor e4m3", *(["per-tensor e5m2 gradient"] if kind != "fprop" else [])]
    for fast in (False, True):
        for scaling in scalings:
            name = f"{scaling}, fast" if fast else scaling
            for way in ("library", "Triton", "loop"):
                if way != "library" or (scaling == "per-tensor e4m3" and not fast):  # it takes no other here
                    table[f"{name}, {way}"] = quantized(scaling, fast, way)
    for way in ("Triton", "loop"):
        table[f"128-block, {way}"] = quantized("128-block", False, way)
    return table


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    if not chosen.skip_gate:
        gate(Case(4, 512, 768, 1000))
    for case in CASES[: chosen.shapes]:
        for skewed in (False, True):
            torch.compiler.reset()
            where: Row = {"case": str(case), "splits": "skewed" if skewed else "equal"}
            dy = torch.randn(case.tokens, case.out_features, device="cuda").bfloat16()
            prepared = ring(lambda case=case, skewed=skewed: inputs(case, skewed))
            times = time_in_turns(layer_steps(case, dy, chosen), prepared, chosen.repeats)
            rows += summarize({**where, "what": "layer"}, times, 6 * case.multiplications)
            del prepared, dy
            torch.cuda.empty_cache()
            sets = [operands(case, skewed) for _ in range(2)]
            for kind in KINDS:
                table = {
                    n: run for n, run in gemms(case, kind).items() if chosen.only in n or n.startswith("bf16")
                }
                times = time_in_turns(table, sets, chosen.repeats)
                rows += summarize({**where, "what": kind}, times, 2 * case.multiplications)
            del sets
            torch.cuda.empty_cache()
    return rows


def summarize(where: Row, times: dict[str, list[float]], operations: int) -> list[Row]:
    """One row per contender from microseconds per launch; the first is the yardstick."""
    yardstick = statistics.median(next(iter(times.values())))
    rows: list[Row] = []
    for name, values in times.items():
        median = statistics.median(values)
        row: Row = {**where, "contender": name}
        row |= {key: round(float(str(value)), 1) for key, value in spread(values, "us").items()}
        row |= {"TFLOP/s": round(operations / (median * 1e6), 1), "share": round(median / yardstick, 3)}
        rows.append(row)
    return rows


def main() -> None:
    chosen = parser(__doc__).parse_args()
    if runs_on_gpu(chosen):
        torch.manual_seed(0)
        report("grouped_linear", measure(chosen), chosen)


if __name__ == "__main__":
    main()
