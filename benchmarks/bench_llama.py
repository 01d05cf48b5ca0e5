"""Training steps of the whole Llama-3.1-8B shape under FSDP2: 32 blocks, embedding, head and loss, 8192 tokens a GPU.

    torchrun --nproc-per-node 2 benchmarks/bench_llama.py [--save]

One sequence of 8192 tokens on each GPU, no recomputation; parameters, gradients and moments are bf16. The bf16 peer is
plain PyTorch with its fused AdamW, sharded by ``fully_shard``. The recipes are those of this library with weights
gathered quantized, an FP8 head whose logits are kept whole, and ``FusedAdam``. Blocks and loss are compiled one by one.
``model TFLOP/s`` is of one GPU: 6 operations per GEMM weight and token, and causal attention; it is the same work for
all contenders.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_transformer import PlainBlock, layer
from harness import Row, is_late, parser, rank_ms, report_of_ranks
from torch import Tensor, nn

import narrowcast as nc

BF16 = torch.bfloat16
WIDE = (4096, 14336, 32, 8)  # hidden, ffn, heads, heads of keys and values
LENGTH, VOCABULARY = 8192, 128256
CONTENDERS = {"bf16": None, "delayed": nc.recipe.DelayedScaling, "current": nc.recipe.Float8CurrentScaling}


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())


def quantized_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return nc.linear_cross_entropy(hidden, weight, targets, chunk_size=weight.shape[0], recipe="current")


class Model(nn.Module):
    """Embedding, blocks, norm, head and loss; ``ours``: blocks and head of this library."""

    def __init__(self, ours: bool, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        like: dict[str, Any] = {"dtype": BF16, "device": "cuda"}
        self.embedding = nn.Embedding(VOCABULARY, WIDE[0], **like)
        self.blocks = nn.ModuleList(layer(WIDE) if ours else PlainBlock(*WIDE) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDE[0], eps=1e-5, **like)
        self.head = nn.Linear(WIDE[0], VOCABULARY, bias=False, **like)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        rope = nc.RotaryPositionEmbedding(WIDE[0] // WIDE[2], rotary_base=500_000.0).to("cuda")
        self.register_buffer("positions", rope(LENGTH).to("cuda"), persistent=False)
        self.loss = torch.compile(quantized_loss if ours else whole_loss, fullgraph=True)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, rotary_pos_emb=self.positions)
        return self.loss(self.norm(x), self.head.weight, targets)


def sharded(recipe: Any, layers: int) -> tuple[Model, torch.optim.Optimizer]:
    """Return a contender's model over all GPUs, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model(recipe is not None, layers)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    if recipe is None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        nc.set_recipe(model, {"blocks": recipe()})
        nc.distributed.shard(model, mesh, blocks=model.blocks, recompute=False, mp_policy=policy)
        moments: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
        optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-5, weight_decay=0.01, **moments)
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model, optimizer


def operations(layers: int) -> float:
    """Return the model's operations per token of a training step."""
    hidden, ffn, heads, groups = WIDE
    block = hidden * (2 * hidden + 2 * hidden * groups // heads + 3 * ffn)
    return 6.0 * (layers * (block + hidden * LENGTH) + hidden * VOCABULARY)


def timed(name: str, chosen: Namespace) -> Row:
    torch.compiler.reset()
    model, optimizer = sharded(CONTENDERS[name], chosen.layers)
    gc.collect()
    torch.cuda.empty_cache()
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    words = torch.randint(VOCABULARY, (1, LENGTH + 1), device="cuda", generator=generator)
    given, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def step() -> Tensor:
        loss = model(given, targets)
        loss.backward()
        optimizer.step()
        if name == "delayed":
            nc.reduce_delayed_scaling(model)
        optimizer.zero_grad()
        return loss

    losses = [step().item() for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    ms = torch.tensor(statistics.median(rank_ms(step, chosen.repeats) for _ in range(3)), device="cuda")
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)  # the slowest GPU says when a step is done
    rate = LENGTH * 1e3 / ms.item()
    return {
        "layers": chosen.layers,
        "ms": round(ms.item(), 1),
        "tokens/s/GPU": round(rate),
        "model TFLOP/s": round(rate * operations(chosen.layers) / 1e12),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss after 4": round(losses[-1], 3),
    }


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    began = time.monotonic()
    for name in CONTENDERS:
        if chosen.only in name and not is_late(began, chosen.budget):
            row: Row = {"contender": name, "GPUs": dist.get_world_size(), **timed(name, chosen)}
            gc.collect()
            torch.cuda.empty_cache()
            first = rows[0] if rows else row
            row["vs bf16"] = round(row["tokens/s/GPU"] / first["tokens/s/GPU"], 3)  # type: ignore[operator]
            rows.append(row)
            if dist.get_rank() == 0:
                print(f"{time.monotonic() - began:.0f} s", row, flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=4)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--budget", type=float, default=600, help="seconds after which no contender starts")
    report_of_ranks("llama", measure, options.parse_args())


if __name__ == "__main__":
    main()
