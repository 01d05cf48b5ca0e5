"""The experts of a mixture on one GPU: fc1, SwiGLU, fc2, forward and backward, replayed as CUDA graphs.

64 experts of DeepSeek's shape, 2048 -> 2 x 1408 -> SwiGLU -> 2048, and the 49,152 rows of 8192 tokens with six experts
each. The peer is plain PyTorch, compiled whole: bf16 ``grouped_mm`` and a gated SiLU. "one by one" runs the three
operations without their fusion. "stored weights" has them in FP8, "written codes" in bf16 and, beside that, in FP8 as
``FusedAdam(weight_codes=)`` leaves them: the step quantizes none. "with optimizer" is a whole step, the peer's with
``torch.optim.AdamW(fused=True)``, the others' with that optimizer; moments are bf16. Contenders take turns with the
peer; each one's gradients are compared with the peer's first. ``layer`` rows are one ``GroupedLinear`` 2048 -> 1408
alone. ``--account`` prints what each step consists of.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import RECIPES, Row, captured, error_of, parser, print_account, report_on_gpu, seconds_of
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.ops.registry import REGISTRY

EXPERTS, HIDDEN, FFN, ROWS = 64, 2048, 1408, 49152
PEER = "torch: bf16, compiled"
ROUNDS = 5
KINDS = (", written codes", "", ", stored weights", ", one by one")


class Plain(nn.Module):
    """The peer; ``whole``: with activation and second layer."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * FFN if whole else FFN, HIDDEN, **options))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, FFN, **options)) if whole else None

    def forward(self, rows: Tensor, splits: Tensor) -> Tensor:
        ends = splits.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        if self.down is None:
            return hidden
        gate, up = hidden.chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)


class Experts(nn.Module):
    """The same of narrowcast's operations."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        options["single_grouped_weight"] = True
        layers = [nc.ops.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN if whole else FFN, **options)]
        if whole:
            layers += [nc.ops.SwiGLU(), nc.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, **options)]
        self.all = nc.ops.Sequential(*layers)

    def forward(self, rows: Tensor, splits: Tensor) -> Tensor:
        return self.all(rows, *[splits] * ((len(self.all) + 1) // 2))


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """No operations are fused."""
    kept, REGISTRY.joint = REGISTRY.joint, []
    REGISTRY.version += 1
    try:
        yield
    finally:
        REGISTRY.joint = kept
        REGISTRY.version += 1


def made(name: str, whole: bool) -> Any:
    """A contender: rows and splits to results; its weights are drawn alike."""
    recipe = next((make() for key, make in RECIPES.items() if name.startswith(key)), None)
    stored: Any = contextlib.nullcontext()
    if "stored" in name:
        stored = nc.quantized_model_init(enabled=True, recipe=recipe)
    with stored:
        model = Plain(whole) if name == PEER else Experts(whole)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
            parameter.copy_(values.normal_(std=0.02, generator=generator))
    if recipe is not None:
        nc.set_recipe(model, recipe)
    return torch.compile(model, fullgraph=True) if name == PEER else model


def step_of(run: Any, x: Tensor, dy: Tensor, splits: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = (x, *run.parameters())
    return lambda: torch.autograd.grad(run(x, splits), leaves, dy)


def training_step_of(run: Any, x: Tensor, dy: Tensor, splits: Tensor, plain: bool) -> Callable[[], None]:
    """A step with its optimizer."""
    options: dict[str, Any] = {"lr": 1e-5, "capturable": True}
    if plain:
        optimizer: Any = torch.optim.AdamW(run.parameters(), fused=True, **options)
    else:
        options |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
        optimizer = nc.optimizers.FusedAdam(run.parameters(), weight_codes=run, **options)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        run(x, splits).backward(dy)
        optimizer.step()

    return step


def measure_training(chosen: Namespace, x: Tensor, dy: Tensor, splits: Tensor) -> list[Row]:
    rows: list[Row] = []
    plain = training_step_of(
        made(PEER, True), x, dy, splits, True
    )  # kept, for a replay keeps none of its tensors
    peer = captured(plain)
    for name in RECIPES:
        if not re.search(chosen.only, f"{name}, with optimizer"):
            continue
        step = training_step_of(made(name, True), x, dy, splits, False)
        times = milliseconds({PEER: peer, name: captured(step)})
        ms, base = times[name], times[PEER]
        row: Row = {"what": "experts", "contender": f"{name}, with optimizer", "ms": round(ms, 3)}
        rows.append({**row, "peer_ms": round(base, 3), "share": round(ms / base, 3)})
        print(rows[-1], flush=True)
        if chosen.account:
            print_account(f"{name}, with optimizer", step, ms)
        del step
        torch.cuda.empty_cache()
    return rows


def milliseconds(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of steps in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds_of(step, 1)
            times[name].append(1e3 * seconds_of(step, 5))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    splits = torch.full((EXPERTS,), ROWS // EXPERTS, device="cuda")
    names = [f"{name}{kind}" for kind in KINDS for name in RECIPES]
    for whole in (True, False)[: chosen.shapes]:
        x, dy = (torch.randn(ROWS, n, device="cuda").bfloat16() for n in (HIDDEN, HIDDEN if whole else FFN))
        x.requires_grad_(True)
        torch.compiler.reset()
        exact = step_of(made(PEER, whole), x, dy, splits)
        expected, peer = [grad.float() for grad in exact()], captured(exact)
        if chosen.account:
            print_account(PEER, exact, milliseconds({PEER: peer})[PEER])
        for name in names:
            if not re.search(chosen.only, name) or (not whole and "one by one" in name):
                continue
            with one_by_one() if "one by one" in name else contextlib.nullcontext():
                run = made(name, whole)
                written = (
                    nc.optimizers.FusedAdam(run.parameters(), weight_codes=run) if "written" in name else None
                )
                step = step_of(run, x, dy, splits)
                for _ in range(2):
                    grads = step()
                    nc.renew_delayed_scaling(run)
                errors = [error_of(*pair) for pair in zip(grads, expected, strict=True)]
                assert max(errors) < 0.2, f"{name}: {errors}"
                del grads
                times = milliseconds({PEER: peer, name: captured(step)})
            ms, base = times[name], times[PEER]
            row: Row = {"what": "experts" if whole else "layer", "contender": name, "ms": round(ms, 3)}
            row |= {"peer_ms": round(base, 3), "share": round(ms / base, 3)}
            rows.append({**row, "largest error": round(max(errors), 4)})
            print(rows[-1], flush=True)
            if chosen.account:
                print_account(name, step, ms)
            del step, run, written
            torch.cuda.empty_cache()
        del exact, peer, expected
        if whole:
            rows += measure_training(chosen, x, dy, splits)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--account", action="store_true", help="print the kernels of each step")
    report_on_gpu("experts", measure, options.parse_args())


if __name__ == "__main__":
    main()
