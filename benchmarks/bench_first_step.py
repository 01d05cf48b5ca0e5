"""First training step of a compiled stack of ``TransformerLayer``s: how long it takes, relative to the same in bf16.

Each case runs in a process of its own, without the compiler's caches of earlier ones. On a GPU Inductor compiles, and
the time is the wall clock's. On a CPU nothing is compiled after the graphs are traced (``aot_eager``), and the time
is the process's. A second process with the caches of the first follows; ``step_ms`` is that of its warm steps,
forward and backward as a loop issues them, on a GPU. ``--cases`` names the recipes, between semicolons. ``--how`` is
"whole" for the stack as one graph, "by block" for one compiled block that serves as all. ``--jobs`` cases run side by
side.
``bits`` is a hash of the output and the gradients.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from harness import Row, parser, report, seconds_of
from torch import Tensor, nn

import narrowcast as nc

BATCH = 4
STEPS, TURNS = 20, 5  # of warm steps
RECIPES: dict[str, Any] = {
    "bf16": lambda: None,
    "current": nc.recipe.Float8CurrentScaling,
    "delayed": nc.recipe.DelayedScaling,
    "block": nc.recipe.Float8BlockScaling,
}


class Stack(nn.Module):
    """Blocks in a row, of heads of 64."""

    def __init__(self, layers: int, hidden: int, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False}
        options |= {"normalization": "RMSNorm", "activation": "swiglu", "attn_input_format": "bshd"}
        options |= {"params_dtype": torch.bfloat16, "device": device}
        sizes = hidden, 4 * hidden, hidden // 64
        self.blocks = nn.ModuleList(
            nc.TransformerLayer(*sizes, layer_number=number, **options) for number in range(1, layers + 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def first_step(
    layers: int, hidden: int, length: int, how: str, name: str, device: str
) -> tuple[float, str, float]:
    """Seconds of the first forward and backward, on top of what PyTorch's compiler takes to load; a hash of results;
    milliseconds of a warm step, 0 on a CPU."""
    torch.manual_seed(0)
    model = Stack(layers, hidden, device)
    nc.set_recipe(model, RECIPES[name]())
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch.compile(nn.Linear(8, 8).to(device), backend=backend)(
        torch.ones(2, 8, device=device)
    ).sum().backward()
    run: nn.Module = model
    if how == "whole":
        run = torch.compile(model, fullgraph=True, backend=backend)  # type: ignore[assignment]
    else:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
    x = torch.randn(BATCH, length, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    y = run(x)
    y.sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - start
    bits = digest([y, x.grad, *(p.grad for p in model.parameters())])
    return seconds, bits, warm_ms(model, lambda: run(x).sum().backward()) if device == "cuda" else 0.0


def warm_ms(model: nn.Module, step: Callable[[], None]) -> float:
    """Milliseconds of a step among steps that follow each other, the median of turns."""

    def once() -> None:
        step()
        model.zero_grad()

    once()
    once()
    return 1e3 * statistics.median(seconds_of(once, STEPS, "cuda") for _ in range(TURNS))


def digest(tensors: list[Any]) -> str:
    """The beginning of a hash of tensors' bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def in_processes(*case: Any) -> Row:
    """What a process finds, and one with its caches after it; NaN where they failed."""
    found: list[list[str]] = []
    with tempfile.TemporaryDirectory() as caches:
        own = {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
        words = [sys.executable, __file__, "--case", json.dumps(case)]
        for _ in range(2):
            done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-2000:], flush=True)
                return {"first_step_s": float("nan")}
            found.append(done.stdout.splitlines()[-1].split())
            print(*case, *found[-1], flush=True)
    (first, bits, _), (second, _, milliseconds) = found
    row: Row = {"first_step_s": round(float(first), 2), "second_process_s": round(float(second), 2)}
    return row | {"step_ms": round(float(milliseconds), 2), "bits": bits}


def measure(chosen: Namespace) -> list[Row]:
    names, ways = chosen.cases.split(";"), chosen.how.split(";")
    sizes = chosen.layers, chosen.hidden, chosen.length
    cases = [(*sizes, how, name, chosen.device) for how in ways for name in names]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found = dict(zip(cases, pool.map(lambda case: in_processes(*case), cases)))
    rows: list[Row] = []
    for case, measured in found.items():
        layers, hidden, _, how, name, device = case
        row: Row = {"layers": layers, "hidden": hidden, "how": how, "recipe": name}
        row |= {"backend": "inductor" if device == "cuda" else "aot_eager"} | measured
        base = found.get((*sizes, how, "bf16", device), {})
        for seconds, share in ("first_step_s", "share_of_bf16"), ("step_ms", "step_share_of_bf16"):
            if base.get(seconds):
                row[share] = round(row[seconds] / base[seconds], 2)
        rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--length", type=int, default=2048, help="tokens of each of the 4 sequences")
    options.add_argument("--cases", default=";".join(RECIPES))
    options.add_argument("--how", default="whole;by block")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--case", help="for the processes that this one starts")
    chosen = options.parse_args()
    if chosen.case:
        case = json.loads(chosen.case)
        print(*first_step(*case))
        return
    report("first_step", measure(chosen), chosen)


if __name__ == "__main__":
    main()
