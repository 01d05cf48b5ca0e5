"""``TransformerLayer``: a block of the 8B shape, also over one long sequence, and training steps of four.

The bf16 peer of the block is plain PyTorch (RMSNorm, linear layers, scaled_dot_product_attention, SwiGLU), compiled as
ours are. ``--only`` chooses contenders by how their names begin: "block", "32k block", "steps, delayed".
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, parser, report_on_gpu, seconds_of
from torch import Tensor, nn

import narrowcast as nc

BF16 = torch.bfloat16
WIDE = (4096, 14336, 32, 8)  # hidden, ffn, heads, groups
ONE_B = (2048, 8192, 32, 8)
LAYERS, BATCH, LENGTH, VOCABULARY = 4, 4, 2048, 32000
RECIPES: dict[str, str | None] = {
    "torch bf16": None,
    "narrowcast bf16": None,
    "delayed": "delayed",
    "current": "current",
    "rowwise": "rowwise",
    "block-scaled": "block",
}


class PlainBlock(nn.Module):
    """The block in plain PyTorch."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, device: str = "cuda") -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, hidden // heads
        like: Any = {"bias": False, "dtype": BF16, "device": device}
        self.norm1 = nn.RMSNorm(hidden, eps=1e-5, dtype=BF16, device=device)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-5, dtype=BF16, device=device)
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.width, **like)
        self.proj = nn.Linear(hidden, hidden, **like)
        self.fc1, self.fc2 = nn.Linear(hidden, 2 * ffn, **like), nn.Linear(ffn, hidden, **like)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        sizes = [self.heads, self.groups, self.groups]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (sum(sizes), self.width)).split(sizes, 2)
        angles = rotary_pos_emb[: x.shape[1], 0].unsqueeze(0)
        cosine, sine = angles.cos(), angles.sin()
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.norm2(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x.float() * cosine + torch.cat([-second, first], -1) * sine).to(x.dtype)


def layer(sizes: tuple[int, int, int, int], number: int = 1, device: str = "cuda") -> nc.TransformerLayer:
    hidden, ffn, heads, groups = sizes
    return nc.TransformerLayer(
        hidden,
        ffn,
        heads,
        num_gqa_groups=groups,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="bshd",
        layer_number=number,
        params_dtype=BF16,
        device=device,
    )


def blocks(name: str, count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    if name == "torch bf16":
        made = nn.ModuleList(PlainBlock(*WIDE) for _ in range(count))
    else:
        made = nn.ModuleList(layer(WIDE, number) for number in range(1, count + 1))
        nc.set_recipe(made, RECIPES[name])
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return made


def angles(sizes: tuple[int, int, int, int], length: int, device: str = "cuda") -> Tensor:
    rope = nc.RotaryPositionEmbedding(sizes[0] // sizes[2], rotary_base=500_000.0).to(device)
    return rope(length).to(device)


def timed(step: Callable[[], Any], repeats: int, each: int = 5) -> float:
    """Median seconds of a step, host included."""
    return statistics.median(seconds_of(step, each) for _ in range(repeats))


def fresh() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# sequences and their tokens, by what the contenders' names begin with
BLOCKS = {"block": (BATCH, LENGTH), "32k block": (1, 32768)}


def block(kind: str, name: str, repeats: int) -> Row:
    """Forward and backward of one block, compiled; the peak of memory includes the parameters and their gradients."""
    fresh()
    batch, length = BLOCKS[kind]
    (own,), positions = blocks(name, 1), angles(WIDE, length)
    run = torch.compile(own, fullgraph=True)
    x = torch.randn(batch, length, WIDE[0], dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        own.zero_grad(set_to_none=True)
        run(x, rotary_pos_emb=positions).backward(dy)
        if name == "delayed":
            nc.renew_delayed_scaling(own)  # as an optimizer's step does

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"contender": f"{kind}, {name}", "ms": timed(step, repeats) * 1e3, "peak_gib": peak / 2**30}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDE[0], dtype=BF16, device="cuda")
        self.blocks = blocks(name, LAYERS)
        self.norm = nn.RMSNorm(WIDE[0], eps=1e-5, dtype=BF16, device="cuda")
        self.head = nn.Linear(WIDE[0], VOCABULARY, bias=False, dtype=BF16, device="cuda")

    def forward(self, words: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(words)
        for own in self.blocks:
            x = own(x, rotary_pos_emb=positions)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    # the same state: moments of the parameters' dtype; it also writes the codes of the weights
    "FusedAdam": lambda model: nc.optimizers.FusedAdam(
        model.parameters(),
        lr=1e-4,
        weight_decay=0.01,
        exp_avg_dtype=BF16,
        exp_avg_sq_dtype=BF16,
        weight_codes=model,
    ),
}


def steps(name: str, optimizer_name: str, repeats: int) -> Row:
    """Training steps of four blocks with embedding and head in bf16, and an optimizer; compiled but for that."""
    fresh()
    model, positions = Model(name), angles(WIDE, LENGTH)
    if name not in ("torch bf16", "narrowcast bf16"):
        nc.set_recipe(model, {"blocks": RECIPES[name]})
    optimizer = OPTIMIZERS[optimizer_name](model)
    run = torch.compile(model, fullgraph=True)
    words = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda")
    inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def step() -> Tensor:
        loss = run(inputs, targets, positions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step().item() for _ in range(6)]
    seconds = timed(step, repeats)
    row: Row = {
        "contender": contender_of_steps(name, optimizer_name),
        "ms": seconds * 1e3,
        "tokens_per_second": BATCH * LENGTH / seconds,
    }
    return row | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss_after_6": losses[-1]}


def contender_of_steps(name: str, optimizer_name: str) -> str:
    return f"steps, {name}" if optimizer_name == "AdamW" else f"steps, {name}, {optimizer_name}"


def measure(options: argparse.Namespace) -> list[Row]:
    cases: dict[str, tuple[str, Callable[[], Row]]] = {}
    for kind in BLOCKS:
        for name in RECIPES:
            run = partial(block, kind, name, options.repeats)
            cases[f"{kind}, {name}"] = f"{kind}, torch bf16", run
    for optimizer in OPTIMIZERS:
        for name in RECIPES if optimizer == "AdamW" else ("torch bf16", "delayed", "current"):
            cases[contender_of_steps(name, optimizer)] = (
                "steps, torch bf16",
                lambda name=name, optimizer=optimizer: steps(name, optimizer, options.repeats),
            )
    rows = []
    for name, (_, run) in cases.items():
        if name.startswith(options.only):
            try:
                rows.append(run())
            except Exception as error:  # the others are measured all the same, and the row says what happened
                rows.append({"contender": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            print(rows[-1], flush=True)
    times = {str(row["contender"]): float(str(row["ms"])) for row in rows if "ms" in row}
    for row in rows:
        base = times.get(cases[str(row["contender"])][0])
        if base and "ms" in row:
            row["share_of_bf16"] = float(str(row["ms"])) / base
    return rows


def main() -> None:
    report_on_gpu("transformer", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
