"""Linear layers on groups of rows, as the experts of a mixture: forward and backward, and the three GEMMs alone.

`layer` rows time a step of ``GroupedLinear``, splits on the host or on the device: eager, compiled, and as replays of a
CUDA graph, each beside a bf16 ``grouped_mm`` in the same mode, with the peak of memory. Every recipe's gradients are
first compared with bf16's. The other rows time one grouped GEMM on operands quantized before, and bf16 ``grouped_mm``.
Splits are equal, or skewed: half of the groups have a tenth of the rows.
"""

from __future__ import annotations

import gc
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_gemm import QUANTIZERS as DENSE
from harness import RECIPES, Row, captured, parser, rates, report_on_gpu, seconds_of, time_in_turns
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import functional
from narrowcast.tensors import grouped_layout
from narrowcast.testing import assert_close

UNDER: dict[str, nc.recipe.Recipe | None] = {
    "bf16": None,
    **{name: make() for name, make in RECIPES.items()},
    "current e4m3": nc.recipe.Float8CurrentScaling(fp8_format=nc.recipe.Format.E4M3),
}
PEER = "torch: bf16 grouped_mm"


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
ROUNDS, SECONDS = 7, 0.05


class Contender(NamedTuple):
    """``run``: of input (T, K); ``parameters``: whose gradients a step takes."""

    run: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    end_step: Callable[[], Any] = lambda: None


def peer(case: Case, splits: list[int]) -> Contender:
    """``grouped_mm`` alone, in bf16."""
    weight = torch.randn(case.groups, case.out_features, case.in_features, device="cuda").bfloat16()
    parameter = nn.Parameter(weight.mul_(0.02))
    ends = torch.tensor(splits, device="cuda").cumsum(0, dtype=torch.int32)
    return Contender(lambda x: F.grouped_mm(x, parameter.transpose(-2, -1), offs=ends), [parameter])


def layer(case: Case, recipe: nc.recipe.Recipe | None, splits: list[int] | Tensor) -> Contender:
    made = nc.GroupedLinear(
        case.groups,
        case.in_features,
        case.out_features,
        bias=False,
        device="cuda",
        params_dtype=torch.bfloat16,
        single_grouped_parameter=True,
    )
    nc.set_recipe(made, recipe)
    return Contender(
        lambda x: made(x, splits), list(made.parameters()), lambda: nc.renew_delayed_scaling(made)
    )


def layers(case: Case, sizes: list[int], chosen: Namespace) -> dict[str, Callable[[], Contender]]:
    """Makers of a contender by name, the yardstick first."""
    makers: dict[str, Callable[[], Contender]] = {PEER: lambda: peer(case, sizes)}
    for name, recipe in UNDER.items():
        makers[f"{name}, host splits"] = lambda recipe=recipe: layer(case, recipe, sizes)
        device = torch.tensor(sizes, device="cuda")
        makers[f"{name}, device splits"] = lambda recipe=recipe, device=device: layer(case, recipe, device)
    return {name: make for name, make in makers.items() if name == PEER or chosen.only in name}


def layer_rows(case: Case, sizes: list[int], where: Row, chosen: Namespace) -> list[Row]:
    """Eager, compiled and captured steps: milliseconds, share of the yardstick in the same mode, and the peak in MiB.

    The peak has all that a step holds: input, weights, output, their gradients, and what the layer needs beside them.
    """
    rows: list[Row] = []
    first: dict[str, float] = {}
    for name, make in layers(case, sizes, chosen).items():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        x = torch.randn(case.tokens, case.in_features, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn(case.tokens, case.out_features, device="cuda").bfloat16()
        run, parameters, end_step = make()
        torch.autograd.grad(run(x), (x, *parameters), dy)
        end_step()  # delayed scaling has learned its scales
        times: dict[str, float] = {}
        for mode in ("eager", "compiled", "captured"):
            if mode == "compiled" and chosen.skip_compile:
                continue
            forward = torch.compile(run, fullgraph=True) if mode == "compiled" else run

            def step(forward: Any = forward, x: Any = x, parameters: Any = parameters, dy: Any = dy) -> Any:
                return torch.autograd.grad(forward(x), (x, *parameters), dy)

            times[mode] = milliseconds(captured(step) if mode == "captured" else step)
            if mode == "eager":
                torch.cuda.reset_peak_memory_stats()
                step()
                peak = (torch.cuda.max_memory_allocated() - held) / 2**20
        first = first or {**times, "peak": peak}
        row: Row = {**where, "what": "layer", "contender": name}
        for mode, ms in times.items():
            row |= {f"{mode}_ms": round(ms, 3), f"{mode}_share": round(ms / first[mode], 3)}
        rows.append({**row, "peak_MiB": round(peak), "peak_share": round(peak / first["peak"], 3)})
        print(rows[-1], flush=True)
        del x, dy, run, parameters, step, forward
    return rows


def milliseconds(step: Step) -> float:
    """Median over rounds of a step's time, steps issued one after the other, the host's time included."""
    seconds_of(step, 3)
    count = max(3, int(SECONDS / seconds_of(step, 3)))
    return 1e3 * statistics.median(seconds_of(step, count) for _ in range(ROUNDS))


def gate(case: Case) -> None:
    """Fail if a recipe's gradients are not those of bf16 within the error of an FP8 layer."""
    x, splits = inputs(case, True)
    dy = torch.randn(case.tokens, case.out_features, device="cuda").bfloat16()
    weight = torch.randn(case.groups, case.out_features, case.in_features, device="cuda").bfloat16()
    results: dict[str, list[Tensor]] = {}
    for name, recipe in UNDER.items():
        run, parameters, end_step = layer(case, recipe, splits)
        with torch.no_grad():
            parameters[0].copy_(weight)
        for _ in range(2):  # delayed scaling needs a step to learn its scales
            grads = torch.autograd.grad(run(x), (x, *parameters), dy)
            end_step()
        results[name] = [grad.float() for grad in grads]
    for name, grads in results.items():
        for ours, exact in zip(grads, results["bf16"], strict=True):
            assert_close(ours, exact, "fp8_layer")
        print(f"correct: gradients of {name} on {case}")


def inputs(case: Case, skewed: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(case.tokens, case.in_features, device="cuda").bfloat16().requires_grad_()
    return x, torch.tensor(splits_of(case, skewed), device="cuda")


QUANTIZERS = {  # of input, weight and grad_output
    "per-tensor e4m3": (nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3),) * 3,
    "per-tensor e5m2 gradient": DENSE["per-tensor"],
    "128-block": DENSE["128-block"],
}
KINDS = {"fprop": (0, 1, False, False), "dgrad": (2, 1, False, True), "wgrad": (2, 0, True, True)}


class Operands(NamedTuple):
    """What one step multiplies, in bf16 and quantized in both directions."""

    tensors: tuple[Tensor, Tensor, Tensor]
    splits: Tensor
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
    return x, Operands((x, w, dy), splits, quantized)


def layout_of(scaling: str) -> str:
    return grouped_layout(QUANTIZERS[scaling][0]._storage_name)


def gemms(case: Case, kind: str) -> dict[str, Step]:
    """Contenders that return the product in bf16."""
    left, right, left_columnwise, right_columnwise = KINDS[kind]

    def bf16(_: Tensor, given: Operands) -> Tensor:
        b = given.tensors[right]
        return functional.grouped_mm(kind, given.tensors[left], [b], given.splits, [], True, torch.bfloat16)

    def quantized(scaling: str, fast: bool) -> Step:
        layout, quantizers = layout_of(scaling), QUANTIZERS[scaling]

        def run(_: Tensor, given: Operands) -> Tensor:
            made = given.quantized[scaling]
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
                fast,
                False,
            )

        return run

    table: dict[str, Step] = {"bf16 grouped_mm": bf16}
    scalings = ["per-tensor e4m3", *(["per-tensor e5m2 gradient"] if kind != "fprop" else [])]
    for fast in (False, True):
        for scaling in scalings:
            table[f"{scaling}, fast" if fast else scaling] = quantized(scaling, fast)
    table["128-block"] = quantized("128-block", False)
    return table


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    if not chosen.skip_gate:
        gate(Case(4, 512, 768, 1000))
    for case in CASES[: chosen.shapes]:
        for skewed in (False,) if chosen.equal_only else (False, True):
            torch.compiler.reset()
            where: Row = {"case": str(case), "splits": "skewed" if skewed else "equal"}
            rows += layer_rows(case, splits_of(case, skewed), where, chosen)
            if chosen.layers_only:
                continue
            sets = [operands(case, skewed) for _ in range(2)]
            for kind in KINDS:
                table = {
                    n: run for n, run in gemms(case, kind).items() if chosen.only in n or n.startswith("bf16")
                }
                times = time_in_turns(table, sets, chosen.repeats)
                rows += rates({**where, "what": kind}, times, 2 * case.multiplications)
            del sets
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers-only", action="store_true", help="without the GEMMs alone")
    options.add_argument("--equal-only", action="store_true", help="without skewed splits")
    report_on_gpu("grouped_linear", measure, options.parse_args())


if __name__ == "__main__":
    main()
