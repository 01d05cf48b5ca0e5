"""Training steps of a whole mixture of 1B active parameters over the two GPUs of a host, experts on both.

    torchrun --nproc-per-node 2 benchmarks/bench_mixture.py [--save]

Twelve blocks of 2048 with 16 heads and eight experts of 5632, two per token; embedding, head and loss of 32,000 words;
four sequences of 2048 tokens on each GPU. Experts are sharded by :class:`nc.distributed.MoEDispatch` with a capacity of
1.25 times an even share; the gradients of all else are averaged. Parameters, gradients and moments are bf16. The peer
is plain PyTorch with ``grouped_mm``, bf16 rows between the GPUs and fused AdamW; the others have quantized linear
layers and experts, rows sent as MXFP8, and ``FusedAdam(weight_codes=)``. Head and loss are bf16, except with "FP8
head"; with "FP8 wires" results and gradients travel in FP8, too. Blocks are compiled one by one, and the whole step is
replayed as a CUDA graph. ``--account`` prints what a step consists of; ``--tiny`` tries the script on two CPU ranks.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_moe_dispatch import IN_CODES, Mixture, account
from harness import RECIPES, Row, captured, parser, rank_ms, report_of_ranks, rows_in_turns
from torch import Tensor, nn

import narrowcast as nc

BF16 = torch.bfloat16
PEER = "torch bf16"
FP8_HEAD = ", FP8 head"
NAMES = (PEER, *(name + kind for kind in ("", FP8_HEAD, IN_CODES + FP8_HEAD) for name in RECIPES))


def sizes_of(chosen: Namespace) -> Namespace:
    if chosen.tiny:
        sizes = {"hidden": 64, "ffn": 128, "heads": 2, "layers": 2, "words": 128, "batch": (2, 32)}
        return Namespace(**sizes, device="cpu", backend="aot_eager")
    sizes = {
        "hidden": 2048,
        "ffn": 5632,
        "heads": 16,
        "layers": chosen.layers,
        "words": 32000,
        "batch": (4, 2048),
    }
    return Namespace(**sizes, device="cuda", backend="inductor")


class Block(nn.Module):
    """Attention and a mixture, each after a norm."""

    def __init__(self, name: str, sizes: Namespace) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": sizes.device, "dtype": BF16}
        linear = nn.Linear if name == PEER else nc.Linear
        hidden, self.heads = sizes.hidden, sizes.heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5, **like) for _ in range(2))
        self.qkv = linear(hidden, 3 * hidden, bias=False, **like)
        self.out = linear(hidden, hidden, bias=False, **like)
        tokens = sizes.batch[0] * sizes.batch[1]
        self.mixture = Mixture(name, tokens, hidden=hidden, ffn=sizes.ffn, device=sizes.device)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture.routed(self.norms[1](x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    def __init__(self, name: str, sizes: Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        like: dict[str, Any] = {"device": sizes.device, "dtype": BF16}
        self.embedding = nn.Embedding(sizes.words, sizes.hidden, **like)
        self.blocks = nn.ModuleList(Block(name, sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5, **like)
        self.head = nn.Linear(sizes.hidden, sizes.words, bias=False, **like)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        if name != PEER:
            nc.set_recipe(self.blocks, RECIPES[name.partition(",")[0]]())
        for part in (*self.blocks, self.norm):
            part.compile(fullgraph=True, backend=sizes.backend)
        loss = loss_in_codes if name.endswith(FP8_HEAD) else loss_of
        self.loss = torch.compile(loss, fullgraph=True, backend=sizes.backend)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x), self.head.weight, targets)


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())


def loss_in_codes(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return nc.linear_cross_entropy(hidden, weight, targets, chunk_size=weight.shape[0], recipe="current")


def average(gradients: list[Tensor | None]) -> None:
    """Average over the ranks, in place."""
    for gradient in gradients:
        assert gradient is not None
        on_gpu = gradient.is_cuda
        dist.all_reduce(gradient, dist.ReduceOp.AVG if on_gpu else dist.ReduceOp.SUM)
        if not on_gpu:  # gloo has no averages
            gradient.div_(dist.get_world_size())


def step_of(name: str, sizes: Namespace) -> tuple[Model, Callable[[], Tensor]]:
    model = Model(name, sizes)
    options: dict[str, Any] = {"lr": 1e-4, "capturable": sizes.device == "cuda"}
    if name == PEER:
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **options)
    else:
        options |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), BF16)
        optimizer = nc.optimizers.FusedAdam(
            model.parameters(), weight_codes=model, weight_decay=0.01, **options
        )
    experts = {id(p) for block in model.blocks for p in block.mixture.experts.parameters()}
    dense = [p for p in model.parameters() if id(p) not in experts]
    generator = torch.Generator(sizes.device).manual_seed(dist.get_rank())
    words = torch.randint(
        sizes.words, (sizes.batch[0], sizes.batch[1] + 1), device=sizes.device, generator=generator
    )

    def step() -> Tensor:
        loss = model(words[:, :-1], words[:, 1:])
        loss.backward()
        average([parameter.grad for parameter in dense])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step


def timed(name: str, sizes: Namespace, chosen: Namespace) -> Row:
    torch.compiler.reset()
    model, step = step_of(name, sizes)
    losses = [step().item() for _ in range(3)]
    count = sum(p.numel() for p in model.parameters())
    row: Row = {"contender": name, "GPUs": dist.get_world_size(), "parameters of a GPU": count}
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        replay = captured(step)
        replay()
        times = [rank_ms(replay, 3) for _ in range(chosen.repeats)]
        ms = torch.tensor(statistics.median(times), device="cuda")
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        row |= {"ms": round(ms.item(), 2), "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
        if chosen.account:
            account(name, step, ms.item(), 24)
    row["third loss"] = round(losses[-1], 4)
    return row


def measure(chosen: Namespace) -> list[Row]:
    sizes = sizes_of(chosen)

    def compared(name: str, rows: list[Row]) -> Row:
        row = timed(name, sizes, chosen)
        if sizes.device == "cuda":
            first = rows[0] if rows else row
            row["times the first"] = round(first["ms"] / row["ms"], 3)  # type: ignore[operator]
        return row

    return rows_in_turns((partial(compared, name) for name in chosen.contenders), chosen.budget)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=12, help="blocks (default 12)")
    options.add_argument(
        "--contenders", nargs="+", choices=NAMES, default=NAMES, help="default: all, the peer first"
    )
    options.add_argument("--account", action="store_true", help="print the kernels of each step")
    options.add_argument("--budget", type=float, default=240, help="seconds after which no contender starts")
    options.add_argument("--tiny", action="store_true", help="two ranks on a CPU, to try the script")
    chosen = options.parse_args()
    if chosen.tiny:
        dist.init_process_group("gloo")
        measure(chosen)
        dist.destroy_process_group()
    else:
        report_of_ranks("mixture", measure, chosen)


if __name__ == "__main__":
    main()
