"""One block of Llama 3 8B as `nc.TransformerLayer`, forward and backward: recipes beside bf16, plain PyTorch and ours.

`share` is the time over that of the plain PyTorch block under torch.compile; `peak_mib` is the memory a step takes
beside its parameters and inputs. The attention is PyTorch's in every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, Step, measure_steps, parser, report, step_of
from torch import Tensor

import narrowcast as nc

YARDSTICK = "bf16, plain, compiled"
Available = Callable[[], bool]
CASES: dict[str, tuple[Callable[[], nc.recipe.Recipe | None], Available]] = {
    "bf16": (lambda: None, lambda: True),
    "delayed": (nc.recipe.DelayedScaling, nc.is_fp8_available),
    "current": (nc.recipe.Float8CurrentScaling, nc.is_fp8_available),
    "block": (nc.recipe.Float8BlockScaling, nc.is_fp8_block_scaling_available),
}


class Plain(torch.nn.Module):
    """The block in plain PyTorch: (b, s, hidden)."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, **factory: Any) -> None:
        super().__init__()
        self.heads, self.groups, dim = heads, groups, hidden // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, eps=1e-5, **factory) for _ in range(2))
        self.qkv = torch.nn.Linear(hidden, (heads + 2 * groups) * dim, bias=False, **factory)
        self.proj = torch.nn.Linear(hidden, hidden, bias=False, **factory)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn, bias=False, **factory)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias=False, **factory)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        sizes = (self.heads, self.groups, self.groups)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (sum(sizes), -1)).transpose(1, 2)
        q, k, v = heads.split(sizes, 1)
        angles = rotary_pos_emb[: x.shape[1], 0, 0]
        out = F.scaled_dot_product_attention(
            turned(q, angles), turned(k, angles), v, is_causal=True, enable_gqa=True
        )
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.norms[1](x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    across = torch.cat((-second, first), -1)
    return (x.float() * angles.cos() + across * angles.sin()).to(x.dtype)


def layer(shape: argparse.Namespace) -> nc.TransformerLayer:
    return nc.TransformerLayer(
        shape.hidden, shape.ffn, shape.heads, shape.groups, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", activation="swiglu", bias=False, fuse_qkv_params=True, qkv_weight_interleaved=False,
        attn_input_format="bshd", params_dtype=torch.bfloat16, device=shape.device,
    )  # fmt: skip


def contenders(chosen: argparse.Namespace) -> dict[str, Step]:
    factory = {"device": chosen.device, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    x = torch.randn(chosen.batch, chosen.length, chosen.hidden, **factory).requires_grad_()
    dy = torch.randn_like(x)
    rope = nc.RotaryPositionEmbedding(chosen.hidden // chosen.heads, rotary_base=5e5).to(chosen.device)
    angles = rope(chosen.length)

    def step(module: torch.nn.Module, compiled: bool, recipe: nc.recipe.Recipe | None) -> Step:
        run = torch.compile(module, fullgraph=True) if compiled else module
        return step_of(module, lambda x: run(x, rotary_pos_emb=angles), x, dy, recipe)

    plain = Plain(chosen.hidden, chosen.ffn, chosen.heads, chosen.groups, **factory)
    steps = {YARDSTICK: step(plain, True, None)}
    for name, (build, available) in CASES.items():
        if chosen.device == "cuda" and not available():
            print(f"{name}: no native GEMM here, skipped")
            continue
        for form in ("eager", "compiled"):
            if chosen.only in (full := f"{name}, {form}") and not (
                chosen.skip_compile and form == "compiled"
            ):
                steps[full] = step(layer(chosen), form == "compiled", build())
    return steps


def main() -> None:
    options = parser(__doc__)
    sizes = {"batch": 4, "length": 2048, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8}
    for name, size in sizes.items():
        options.add_argument(f"--{name}", type=int, default=size)
    chosen = options.parse_args()
    where: Row = {name: getattr(chosen, name) for name in sizes}
    rows = [
        {**where, **row}
        for row in measure_steps(contenders(chosen), YARDSTICK, chosen.repeats, chosen.device)
    ]
    report("transformer_layer", rows, chosen)


if __name__ == "__main__":
    main()
