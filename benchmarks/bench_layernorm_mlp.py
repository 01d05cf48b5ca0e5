"""RMSNorm and SwiGLU feed-forward block, forward and backward: bf16 compiled, and native recipes eager and compiled.

`ratio` is the time over that of the bf16 block under torch.compile; `peak_mib` is the memory a step takes beside its
parameters and inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Row, parser, report, time_ms

import narrowcast as nc

Available = Callable[[], bool]
CASES: dict[str, tuple[Callable[[], nc.recipe.Recipe], Available]] = {
    "delayed": (nc.recipe.DelayedScaling, nc.is_fp8_available),
    "current": (nc.recipe.Float8CurrentScaling, nc.is_fp8_available),
    "block": (nc.recipe.Float8BlockScaling, nc.is_fp8_block_scaling_available),
}


class Plain(torch.nn.Module):
    """The block in plain PyTorch."""

    def __init__(self, hidden: int, ffn: int, **factory: object) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, **factory)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn, bias=False, **factory)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias=False, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def step_of(block: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: nc.recipe.Recipe | None):
    """A forward and backward of ``block``, as a function without arguments."""

    def step() -> None:
        block.zero_grad(set_to_none=True)
        x.grad = None
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = block(x)
        y.backward(dy)

    return step


def timed(step: Callable[[], None], options: argparse.Namespace) -> Row:
    step()
    step()  # delayed scaling needs a step to learn its scales
    if options.device != "cuda":
        return time_ms(step, options.device, options.repeats)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {**time_ms(step, options.device, options.repeats), "peak_mib": peak}


def measure(options: argparse.Namespace) -> list[Row]:
    tokens, hidden, ffn = options.shape
    torch.manual_seed(0)
    factory = {"device": options.device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **factory).requires_grad_()
    dy = torch.randn(tokens, hidden, **factory)
    where: Row = {"tokens": tokens, "hidden": hidden, "ffn": ffn}
    plain = torch.compile(Plain(hidden, ffn, **factory), fullgraph=True)
    rows: list[Row] = [
        {"recipe": "bf16", "mode": "compiled", **where, **timed(step_of(plain, x, dy, None), options)}
    ]
    for name, (build, available) in CASES.items():
        if options.device == "cuda" and not available():
            print(f"{name}: no native GEMM here, skipped")
            continue
        block = nc.LayerNormMLP(
            hidden,
            ffn,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            params_dtype=torch.bfloat16,
            device=options.device,
        )
        for mode in ("eager", "compiled"):
            torch.compiler.reset()
            run = torch.compile(block, fullgraph=True) if mode == "compiled" else block
            rows.append(
                {"recipe": name, "mode": mode, **where, **timed(step_of(run, x, dy, build()), options)}
            )
    for row in rows:
        row["ratio"] = float(str(row["p50_ms"])) / float(str(rows[0]["p50_ms"]))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=3, metavar=("TOKENS", "HIDDEN", "FFN"))
    chosen = options.parse_args()
    if chosen.shape is None:
        chosen.shape = (8192, 4096, 14336) if chosen.device == "cuda" else (64, 64, 128)
    report("layernorm_mlp", measure(chosen), chosen)


if __name__ == "__main__":
    main()
