"""A mixture of eight experts over the GPUs of a host: router, dispatch, experts, combine, forward and backward.

    torchrun --nproc-per-node 2 benchmarks/bench_moe_dispatch.py

Experts of 4096 -> 2 x 14336 -> SwiGLU -> 4096, two per token, ``--tokens`` rows on each GPU, a fixed capacity of 1.25
times an even share, so that nothing is read from the device: one step of each contender runs in CUDA's sync debug mode
"error". ``torch bf16`` sends rows in bf16 and multiplies with ``grouped_mm``; it permutes as the others do. The others
are ``MoEDispatch`` with a list of two ``ops.GroupedLinear`` and ``ops.SwiGLU``, rows sent as MXFP8 except in
"narrowcast bf16"; with "FP8 wires" results and gradients, too, and the experts read the codes. With "written codes"
the weights are quantized as ``FusedAdam(weight_codes=)`` leaves them, outside the step. All run in eager code,
compiled, and replayed as CUDA graphs of the eager step; each one's gradients are compared with those of the first one
before it is timed. Delivered codes must give the bits of delivered rows. ``--account`` prints the kernels of the steps
that are captured.
"""

from __future__ import annotations

import re
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    RECIPES,
    Row,
    captured,
    error_of,
    parser,
    print_account,
    rank_ms,
    report_of_ranks,
    rows_in_turns,
)
from torch import Tensor, nn

import narrowcast as nc

EXPERTS, TOPK, HIDDEN, FFN = 8, 2, 4096, 14336
IN_CODES, WRITTEN = ", FP8 wires", ", written codes"
KINDS = ("", IN_CODES, IN_CODES + WRITTEN, WRITTEN)
NAMES = ("torch bf16", *(name + kind for kind in reversed(KINDS) for name in RECIPES), "narrowcast bf16")
MODES = ("eager", "captured", "compiled")
STEPS = 20  # between two looks at the clock: what the host is late with at first counts little


class Experts(nn.Module):
    """The experts of this rank; ``plain``: multiplied by ``grouped_mm``."""

    def __init__(self, count: int, plain: bool, hidden: int, ffn: int, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        options["single_grouped_weight"] = True
        self.up = nc.ops.GroupedLinear(count, hidden, 2 * ffn, **options)
        self.down = nc.ops.GroupedLinear(count, ffn, hidden, **options)
        self.all = nc.ops.Sequential(self.up, nc.ops.SwiGLU(), self.down)
        self.plain = plain

    def forward(self, rows: Tensor, splits: Tensor) -> Tensor:
        if not self.plain:
            return self.all(rows, splits, splits)
        ends = splits.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.up.weight.transpose(-2, -1), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.weight.transpose(-2, -1), offs=ends)


class Mixture(nn.Module):
    """Router of one linear layer, and what :class:`nc.distributed.MoEDispatch` does with the experts."""

    def __init__(
        self,
        name: str,
        tokens: int,
        deliver_codes: bool = True,
        hidden: int = HIDDEN,
        ffn: int = FFN,
        device: str = "cuda",
    ) -> None:
        super().__init__()
        self.optimizer: torch.optim.Optimizer | None = None
        ranks = dist.get_world_size()
        self.router = nn.Linear(hidden, EXPERTS, bias=False, device=device, dtype=torch.bfloat16)
        wire: dict[str, Any] = {"quantizer": None} if "bf16" in name else {}
        if IN_CODES in name:
            quantizer = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3, columnwise=False)
            if name.startswith("block"):
                quantizer = nc.Float8BlockQuantizer(
                    nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1
                )
            wires = ("quantizer", "combine_quantizer", "grad_quantizer")
            wire = {**dict.fromkeys(wires, quantizer), "deliver_codes": deliver_codes}
        capacity = tokens * TOPK * 5 // (4 * ranks)
        self.dispatch = nc.distributed.MoEDispatch(EXPERTS, align_size=16, capacity=capacity, **wire)
        self.experts = Experts(EXPERTS // ranks, name == "torch bf16", hidden, ffn, device)

    def routed(self, x: Tensor) -> Tensor:
        probs, routing = nc.fused_topk_with_score_function(self.router(x).float(), TOPK)
        return self.dispatch(x, probs, routing, x.shape[0] * TOPK, self.experts)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.routed(x)


def step_of(
    name: str, x: Tensor, dy: Tensor, compiled: bool = False, deliver_codes: bool = True
) -> tuple[Mixture, Callable[[], None]]:
    torch.manual_seed(0)
    model = Mixture(name, x.shape[0], deliver_codes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    recipe = RECIPES.get(name.partition(",")[0])
    if recipe is not None:
        nc.set_recipe(model.experts, recipe())
    if name.endswith(WRITTEN):
        model.optimizer = nc.optimizers.FusedAdam(model.experts.parameters(), weight_codes=model.experts)
    run = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        run(x).backward(dy)
        if name.startswith("delayed"):
            nc.renew_delayed_scaling(model)  # as an optimizer's step does

    return model, step


def without_host(step: Callable[[], None]) -> None:
    """A step that may not wait for the device.

    Raises:
        RuntimeError: it does.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def grads_of(model: Mixture, x: Tensor) -> dict[str, Tensor]:
    """Copies of the gradients of a step."""
    found = {"dx": x.grad, "up": model.experts.up.weight.grad, "down": model.experts.down.weight.grad}
    return {key: grad.clone() for key, grad in found.items() if grad is not None}


def different_with_codes(name: str, x: Tensor, dy: Tensor) -> list[str]:
    """The gradients of this rank that have other bits with delivered codes than with delivered rows."""
    both = []
    for deliver_codes in (True, False):
        model, step = step_of(name, x, dy, deliver_codes=deliver_codes)
        for _ in range(2):
            step()
        both.append(grads_of(model, x))
    return [key for key in both[0] if not torch.equal(both[0][key], both[1][key])]


def account(title: str, step: Callable[[], object], ms: float, most: int = 16) -> None:
    """Print the first rank's kernels; the others take the steps with it."""
    if dist.get_rank() == 0:
        print_account(title, step, ms, most)
        return
    for _ in range(2):
        step()


def timed(
    name: str, x: Tensor, dy: Tensor, expected: dict[str, Tensor], mode: str, chosen: Namespace
) -> tuple[Row, dict[str, Tensor]]:
    """A row, and the gradients.

    Raises:
        AssertionError: a gradient is too far from what was expected.
    """
    torch.compiler.reset()
    model, eager = step_of(name, x, dy, mode == "compiled")
    for _ in range(3):
        eager()
    without_host(eager)
    step = eager
    if mode == "captured":
        step = captured(eager)
        step()
    found = grads_of(model, x)
    errors = {key: error_of(found[key], expected[key]) for key in expected}
    assert max(errors.values(), default=0) < 0.2, f"{name}: {errors}"
    torch.cuda.reset_peak_memory_stats()
    times = [rank_ms(step, STEPS) for _ in range(chosen.repeats)]
    ms = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    row: Row = {"contender": name, "mode": mode, "GPUs": dist.get_world_size(), "ms": round(ms.item(), 2)}
    row["largest error"] = round(max(errors.values(), default=0.0), 4)
    row["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if chosen.account and mode == "captured":
        account(name, eager, ms.item())
    return row, found


def measure(chosen: Namespace) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(chosen.tokens, HIDDEN, **draw).requires_grad_()
    dy = torch.randn(chosen.tokens, HIDDEN, **draw) * 1e-2
    expected: dict[str, Tensor] = {}
    began = time.monotonic()
    patterns = dict.fromkeys(MODES, chosen.only) | {"compiled": chosen.only_compiled or chosen.only}
    names = {mode: [name for name in NAMES if re.search(patterns[mode], name)] for mode in MODES}
    modes = [mode for mode in chosen.modes if mode != "compiled" or not chosen.skip_compile]
    firsts: dict[str, Row] = {}
    for name in (name for name in names["eager"] if name.endswith(IN_CODES) and not chosen.skip_gate):
        differ = different_with_codes(name, x, dy)
        where = f"{time.monotonic() - began:.0f} s, rank {dist.get_rank()}"
        print(f"{where}, {name}: gradients with other bits than of rows: {differ}", flush=True)

    def compared(mode: str, name: str, _: list[Row]) -> Row:
        row, found = timed(name, x, dy, expected, mode, chosen)
        if not expected:
            expected.update(found)
        first = firsts.setdefault(mode, row)
        return {**row, "times torch bf16": round(first["ms"] / row["ms"], 3)}  # type: ignore[operator]

    turns = (partial(compared, mode, name) for mode in modes for name in names[mode])
    return rows_in_turns(turns, chosen.budget - (time.monotonic() - began))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=8192, help="rows of each GPU (default 8192)")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: all")
    options.add_argument("--only-compiled", default="", help="of compiled contenders; default: as --only")
    options.add_argument("--account", action="store_true", help="print the kernels of captured steps")
    options.add_argument("--budget", type=float, default=240, help="seconds after which no contender starts")
    report_of_ranks("moe_dispatch", measure, options.parse_args())


if __name__ == "__main__":
    main()
