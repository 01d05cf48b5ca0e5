"""Training steps of the whole Llama-3.1-8B shape under FSDP2: 32 blocks, embedding, head and loss, 8192 tokens a GPU.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun --nproc-per-node 2 benchmarks/bench_llama.py [--save]

One sequence of 8192 tokens on each GPU, no recomputation; parameters, gradients and moments are bf16. The bf16 peer is
plain PyTorch with its fused AdamW, sharded by ``fully_shard``; torchao converts its blocks' linear layers. The recipes
are those of this library with weights gathered quantized, an FP8 head, and ``FusedAdam``. Blocks and head are compiled
one by one, and all blocks run one graph. ``model TFLOP/s`` is of one GPU: 6 operations per GEMM weight and token, and
causal attention; it is the same work for all contenders. ``host ms``: so long the host takes to issue a step that finds
nothing queued. ``retries``: so often the allocator waited for the GPU to get memory back, up to here; segments that can
grow leave it more. "kept": blocks stay gathered between forward and backward. ``--profile`` prints what the kernels of
a step are and what they wait for, on the first GPU.
``--tiny`` tries the script on two ranks of a CPU.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import time
from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_transformer import PlainBlock, layer
from harness import Row, parser, print_streams, rank_ms, report_of_ranks, train_in_turns
from peers.torchao import float8
from torch import Tensor, nn

import narrowcast as nc

BF16 = torch.bfloat16
RECIPES: dict[str, Any] = {
    "delayed": nc.recipe.DelayedScaling,
    "current": nc.recipe.Float8CurrentScaling,
    "delayed, saved in FP8": partial(nc.recipe.DelayedScaling, saved_activations="fp8"),
}
NAMES = ("bf16", "delayed", "current", "torchao tensorwise")


def sizes_of(chosen: Namespace) -> Namespace:
    """Return the model's sizes; ``block``: hidden, ffn, heads, heads of keys and values."""
    if chosen.tiny:
        sizes = {"block": (64, 128, 4, 2), "length": 32, "vocabulary": 256, "device": "cpu"}
        return Namespace(**sizes, layers=2, backend="aot_eager", chunk=128)
    sizes = {"block": (4096, 14336, 32, 8), "length": 8192, "vocabulary": 128256, "device": "cuda"}
    return Namespace(**sizes, layers=chosen.layers, backend="inductor", chunk=chosen.chunk)


class Head(nn.Module):
    """Norm, projection to the vocabulary and loss; with ``chunk`` in FP8, as many classes at a time."""

    def __init__(self, hidden: int, vocabulary: int, chunk: int | None, like: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5, **like)
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden, **like))
        self.chunk = chunk

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.chunk is not None:
            how: dict[str, Any] = {"chunk_size": self.chunk, "recipe": "current"}
            return nc.linear_cross_entropy(hidden, self.weight, targets, **how)
        return F.cross_entropy(F.linear(hidden, self.weight).float().flatten(0, 1), targets.flatten())


class Model(nn.Module):
    """Embedding, blocks, head and loss; ``ours``: blocks and head of this library."""

    def __init__(self, ours: bool, sizes: Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden, _, heads, _ = sizes.block
        like: dict[str, Any] = {"dtype": BF16, "device": sizes.device}
        self.embedding = nn.Embedding(sizes.vocabulary, hidden, **like)
        self.blocks = nn.ModuleList(
            layer(sizes.block, device=sizes.device) if ours else PlainBlock(*sizes.block, sizes.device)
            for _ in range(sizes.layers)
        )
        self.head = Head(hidden, sizes.vocabulary, sizes.chunk if ours else None, like)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        rope = nc.RotaryPositionEmbedding(hidden // heads, rotary_base=500_000.0).to(sizes.device)
        self.register_buffer("positions", rope(sizes.length).to(sizes.device), persistent=False)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, rotary_pos_emb=self.positions)
        return self.head(x, targets)


def sharded(name: str, sizes: Namespace) -> tuple[Model, torch.optim.Optimizer]:
    """Return a contender's model over all ranks, and its optimizer; "…, kept" keeps its blocks gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    name, kept = name.removesuffix(", kept"), name.endswith(", kept")
    model = Model(name in RECIPES, sizes)
    mesh = init_device_mesh(sizes.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    parts = [model.embedding, *model.blocks, model.head]
    if name in RECIPES:
        nc.set_recipe(model, {"blocks": RECIPES[name]()})
        nc.distributed.shard(model, mesh, blocks=parts, recompute=False, mp_policy=policy)
        moments: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
        optimizer: Any = nc.optimizers.FusedAdam(model.parameters(), lr=1e-5, weight_decay=0.01, **moments)
    else:
        if "torchao" in name:
            config = float8.Float8LinearConfig(emulate=sizes.device == "cpu")
            float8.convert_to_float8_training(model.blocks, config=config)
        for part in (*parts, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for part in model.blocks if kept else ():
        part.set_reshard_after_forward(False)  # type: ignore[operator]
    model.head.set_reshard_after_forward(False)  # type: ignore[operator]  # the backward begins with it
    model.embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # which reads no row of it
    for part, following in itertools.pairwise(parts):  # gather it before the block at hand is launched
        part.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    for part in parts[1:]:
        part.compile(fullgraph=True, backend=sizes.backend)
    return model, optimizer


def operations(sizes: Namespace) -> float:
    """Return the model's operations per token of a training step."""
    hidden, ffn, heads, groups = sizes.block
    block = hidden * (2 * hidden + 2 * hidden * groups // heads + 3 * ffn)
    return 6.0 * (sizes.layers * (block + hidden * sizes.length) + hidden * sizes.vocabulary)


def timed(name: str, sizes: Namespace, chosen: Namespace) -> Row:
    began = time.monotonic()
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = sharded(name, sizes)
    gc.collect()
    gc.freeze()  # a search for garbage among what stays would hold the host up in some steps
    torch.cuda.empty_cache()
    generator = torch.Generator(sizes.device).manual_seed(dist.get_rank())
    words = torch.randint(sizes.vocabulary, (1, sizes.length + 1), device=sizes.device, generator=generator)
    given, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def step() -> Tensor:
        loss = model(given, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step().item()]
    first = time.monotonic() - began
    losses += [step().item() for _ in range(3)]
    ms = torch.tensor(statistics.median(rank_ms(step, chosen.repeats) for _ in range(2)), device=sizes.device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)  # the slowest GPU says when a step is done
    began = time.monotonic()
    step()
    host = time.monotonic() - began
    rate = sizes.length * 1e3 / ms.item()
    peak = torch.cuda.max_memory_allocated() if sizes.device == "cuda" else math.nan
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if sizes.device == "cuda" else 0
    gc.unfreeze()
    if chosen.profile and sizes.device == "cuda":
        print_streams(f"{name}, {ms.item():.1f} ms", step, shown=dist.get_rank() == 0)
    return {
        "layers": sizes.layers,
        "classes at a time": model.head.chunk or sizes.vocabulary,
        "ms": round(ms.item(), 1),
        "host ms": round(1e3 * host, 1),
        "tokens/s/GPU": round(rate),
        "model TFLOP/s": round(rate * operations(sizes) / 1e12),
        "peak GiB": round(peak / 2**30, 1),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "retries": retries,
        "loss after 4": round(losses[-1], 3),
        "first step s": round(first, 1),
    }


def measure(chosen: Namespace) -> list[Row]:
    sizes = sizes_of(chosen)
    names = [name for name in chosen.contenders.split(";") if "torchao" not in name or float8 is not None]
    return train_in_turns({name: partial(timed, name, sizes, chosen) for name in names}, chosen.budget)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=8)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--contenders", default=";".join(NAMES), help="in order, between semicolons")
    options.add_argument("--chunk", type=int, default=128256, help="classes of the FP8 head at a time")
    options.add_argument("--budget", type=float, default=600, help="seconds after which no contender starts")
    options.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to try the script")
    report_of_ranks("llama", measure, options.parse_args())


if __name__ == "__main__":
    main()
