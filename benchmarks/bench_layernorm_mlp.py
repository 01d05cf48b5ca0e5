"""RMSNorm and SwiGLU feed-forward block, forward and backward: native recipes, bf16 and torchao compiled beside them.

Ours is there as `LayerNormMLP` and as a list of fusible operations, eager and compiled. `share` is the time over that
of the bf16 block under torch.compile; `peak_mib` is the memory a step takes beside its parameters and inputs.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from harness import RECIPES, Row, Step, measure_steps, parser, report, step_of
from peers import torchao

import narrowcast as nc

YARDSTICK = "bf16, compiled"
AVAILABLE = {
    "delayed": nc.is_fp8_available,
    "current": nc.is_fp8_available,
    "block": nc.is_fp8_block_scaling_available,
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


def contenders(shape: tuple[int, int, int], chosen: argparse.Namespace) -> dict[str, Step]:
    tokens, hidden, ffn = shape
    torch.manual_seed(0)
    factory = {"device": chosen.device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **factory).requires_grad_()
    dy = torch.randn(tokens, hidden, **factory)
    plain = Plain(hidden, ffn, **factory)
    steps = {YARDSTICK: step_of(plain, torch.compile(plain, fullgraph=True), x, dy, None)}
    for name, block in torchao.converted(Plain(hidden, ffn, **factory)).items():
        steps[f"torchao {name}, compiled"] = step_of(block, torch.compile(block, fullgraph=True), x, dy, None)
    for name, build in RECIPES.items():
        if chosen.device == "cuda" and not AVAILABLE[name]():
            print(f"{name}: no native GEMM here, skipped")
            continue
        for form, block in forms(hidden, ffn, chosen.device).items():
            steps[f"{name}, {form}, eager"] = step_of(block, block, x, dy, build())
            compiled = torch.compile(block, fullgraph=True)
            steps[f"{name}, {form}, compiled"] = step_of(block, compiled, x, dy, build())
    return {
        name: step
        for name, step in steps.items()
        if name == YARDSTICK
        or (chosen.only in name and not (chosen.skip_compile and name.endswith("compiled")))
    }


def forms(hidden: int, ffn: int, device: str) -> dict[str, torch.nn.Module]:
    """The block as one module and as a list of fusible operations."""
    ops, factory = nc.ops, {"device": device, "dtype": torch.bfloat16}
    return {
        "LayerNormMLP": nc.LayerNormMLP(
            hidden,
            ffn,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            params_dtype=torch.bfloat16,
            device=device,
        ),
        "ops.Sequential": ops.Sequential(
            ops.RMSNorm(hidden, **factory),
            ops.BasicLinear(hidden, 2 * ffn, **factory),
            ops.SwiGLU(),
            ops.BasicLinear(ffn, hidden, **factory),
        ),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=3, metavar=("TOKENS", "HIDDEN", "FFN"))
    chosen = options.parse_args()
    if chosen.shape is None:
        chosen.shape = (8192, 4096, 14336) if chosen.device == "cuda" else (64, 64, 128)
    tokens, hidden, ffn = chosen.shape
    where: Row = {"tokens": tokens, "hidden": hidden, "ffn": ffn}
    steps = contenders((tokens, hidden, ffn), chosen)
    rows = [{**where, **row} for row in measure_steps(steps, YARDSTICK, chosen.repeats, chosen.device)]
    report("layernorm_mlp", rows, chosen)


if __name__ == "__main__":
    main()
