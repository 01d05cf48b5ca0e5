"""Saved activations in FP8: bytes that a block of the 8B shape holds for its backward, its time, its gradients.

``kept_mib`` is memory allocated after a forward, less its output and what was there before, ``peak_mib`` the most that
forward and backward allocate beyond that. The input counts where the block keeps it, as the last block's output in a
model. ``worst_gradient`` is the largest relative error of a gradient beside the same block without the option.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, parser, report, time_in_turns
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.testing import relative_error

SHAPES = {"cuda": (4096, 14336, 32, 8, 2048, 4), "cpu": (512, 1792, 4, 1, 64, 2)}
RECIPES: dict[str, nc.recipe.Recipe | None] = {
    "bf16": None,
    "current": nc.recipe.Float8CurrentScaling(),
    "current, saved fp8": nc.recipe.Float8CurrentScaling(saved_activations="fp8"),
}


def block(recipe: nc.recipe.Recipe | None, device: str) -> nn.Module:
    width, hidden, heads, groups, *_ = SHAPES[device]
    torch.manual_seed(0)
    return nc.TransformerLayer(
        width, hidden, heads, num_gqa_groups=groups, activation="swiglu", normalization="RMSNorm", bias=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, self_attn_mask_type="causal",
        recipe=recipe, device=device,
    )  # fmt: skip


def gradients(
    run: Callable[..., Tensor], layer: nn.Module, x: Tensor, dy: Tensor, rope: Tensor
) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    layer.zero_grad()
    x.grad = None
    out = run(x, rotary_pos_emb=rope)
    out.backward(dy)
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"output": out.detach(), "input": x.grad, **found}


def measure(options: argparse.Namespace) -> list[Row]:
    device = options.device
    width, _, heads, _, tokens, sequences = SHAPES[device]
    x = torch.randn(tokens, sequences, width, device=device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, sequences, width, device=device).bfloat16()
    rope = nc.RotaryPositionEmbedding(width // heads)(tokens).to(device)
    rows: list[Row] = []
    steps: dict[str, Callable[[], Any]] = {}
    plain: dict[str, dict[str, Tensor]] = {}
    for how in ("", ", compiled"):
        for name, recipe in RECIPES.items():
            layer = block(recipe, device)
            backend = "inductor" if device == "cuda" else "aot_eager"
            run: Any = torch.compile(layer, backend=backend, fullgraph=True) if how else layer
            made = gradients(run, layer, x, dy, rope)
            kept, peak = kept_and_peak(run, x, rope, device)
            row: Row = {"contender": name + how, "kept_mib": kept, "peak_mib": peak}
            if recipe is not None and not recipe.saved_activations:
                plain[how] = {key: value.clone() for key, value in made.items()}
            if "saved" in name:
                expected = plain[how]
                errors = {key: float(relative_error(value, expected[key])) for key, value in made.items()}
                row |= {"same_output": torch.equal(made["output"], expected["output"])}
                worst = sorted(errors, key=errors.__getitem__)[-3:]
                row |= {"worst_gradient": errors[worst[-1]]}
                print({key: round(errors[key], 4) for key in worst})
            rows.append(row)
            steps[name + how] = lambda run=run, layer=layer: gradients(run, layer, x, dy, rope)
            del made
    times = time_in_turns(steps, [()], options.repeats, device=device, queued=False)
    for row in rows:
        row["ms"] = sorted(times[str(row["contender"])])[options.repeats // 2] / 1e3
        row["share_of_eager_bf16"] = float(str(row["kept_mib"])) / max(float(str(rows[0]["kept_mib"])), 1e-9)
        print(row, flush=True)
    return rows


def kept_and_peak(run: Callable[..., Tensor], x: Tensor, rope: Tensor, device: str) -> tuple[float, float]:
    """Return MiB between forward and backward, and the most of both; parameters have gradients before."""
    if device == "cpu":
        return 0.0, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run(x.clone(), rotary_pos_emb=rope)
    kept = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
    out.sum().backward()
    return kept / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=7)
    chosen = options.parse_args()
    torch.manual_seed(1)  # blocks are drawn from seed 0
    report("saved_activations", measure(chosen), chosen)


if __name__ == "__main__":
    main()
