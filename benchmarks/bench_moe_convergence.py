"""Train a small mixture of experts on text with each way to send rows, three seeds each, on a CPU.

    python benchmarks/bench_moe_convergence.py --save

Two blocks of attention and eight experts, two per token, read bytes of Python's standard library. One process runs
``MoEDispatch``: nothing is sent, but every wire quantizes and decodes as it does between ranks. Rows are bf16 there and
everything else is fp32, so that runs of a seed differ by the wires alone. ``error`` is
``||g - g_plain|| / ||g_plain||`` of all gradients of the first step, against plain wires. ``rounded`` is a run with
plain wires whose initial weights are scaled by 1 + 1e-5: it shows how far a loss moves by that alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, parser, report
from torch import Tensor, nn

import narrowcast as nc
from narrowcast_tools.train.data import Corpus, load_corpus, train_batch

STEPS, BATCH, LENGTH, EVALUATED = 200, 8, 64, 8
DIM, HIDDEN, EXPERTS, TOPK, BLOCKS, HEADS = 128, 128, 8, 2, 2, 4
SEEDS = (0, 1, 2)
MX = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
BLOCK = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)
WIRES = ("quantizer", "combine_quantizer", "grad_quantizer", "combine_grad_quantizer")
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": dict.fromkeys(WIRES),
    "rounded": dict.fromkeys(WIRES),
    "dispatch mxfp8": {},
    "all mxfp8": dict.fromkeys(WIRES, MX),
    "all 1x128": dict.fromkeys(WIRES, BLOCK),
}


class Mixture(nn.Module):
    """Router, dispatch, experts and combine; rows are sent in bf16 or as codes of bf16."""

    def __init__(self, wires: dict[str, Any]) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nc.GroupedLinear(EXPERTS, DIM, 2 * HIDDEN, bias=False, device="cpu")
        self.down = nc.GroupedLinear(EXPERTS, HIDDEN, DIM, bias=False, device="cpu")
        self.dispatch = nc.distributed.MoEDispatch(EXPERTS, **wires)

    def experts(self, rows: Tensor, splits: Tensor) -> Tensor:
        gate, up = self.up(rows.float(), splits).chunk(2, -1)
        return self.down(F.silu(gate) * up, splits).bfloat16()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, DIM)
        logits = self.router(flat)
        probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
        _, scores = nc.fused_compute_score_for_moe_aux_loss(logits, TOPK, "softmax")
        loss = nc.fused_moe_aux_loss(scores, routing.sum(0), len(flat), EXPERTS, TOPK, 0.01)
        y = self.dispatch(flat.bfloat16(), probs, routing, len(flat) * TOPK, self.experts)
        return y.float().view_as(x), loss


class Block(nn.Module):
    def __init__(self, wires: dict[str, Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mixture = Mixture(wires)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y, loss = self.mixture(self.norms[1](x))
        return x + y, loss


class Model(nn.Module):
    def __init__(self, wires: dict[str, Any]) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(wires) for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens.long()) + self.place.weight
        balance = x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x)
            balance = balance + loss
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.long().flatten()), balance


def model_of(name: str, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(CONTENDERS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
            if name == "rounded":
                parameter.mul_(1 + 1e-5)
    return model


def gradients(model: Model, corpus: Corpus, seed: int) -> Tensor:
    batch = train_batch(corpus, batch_size=BATCH, seq_len=LENGTH, seed=seed, step=0)
    loss, balance = model(*batch)
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss + balance, [*model.parameters()])])


def train(name: str, corpus: Corpus, seed: int, steps: int) -> Row:
    first, plain = (gradients(model_of(one, seed), corpus, seed) for one in (name, "plain"))
    model = model_of(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    losses: list[float] = []
    for step in range(steps):
        batch = train_batch(corpus, batch_size=BATCH, seq_len=LENGTH, seed=seed, step=step)
        loss, balance = model(*batch)
        optimizer.zero_grad()
        (loss + balance).backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = corpus.held_out[: EVALUATED * BATCH * LENGTH + 1].long()
        parts = zip(held_out[:-1].view(EVALUATED, BATCH, LENGTH), held_out[1:].view(EVALUATED, BATCH, LENGTH))
        held_out_loss = sum(model(*part)[0].item() for part in parts) / EVALUATED
    last = losses[-max(steps // 10, 1) :]
    row: Row = {"wires": name, "seed": seed, "steps": steps, "tokens_per_step": BATCH * LENGTH}
    row |= {"error": float((first - plain).norm() / plain.norm())}
    return row | {"training_loss": sum(last) / len(last), "held_out_loss": held_out_loss}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=STEPS)
    chosen: argparse.Namespace = options.parse_args()
    corpus = load_corpus(None, seq_len=LENGTH)
    names = [name for name in CONTENDERS if chosen.only in name]
    rows = [train(name, corpus, seed, chosen.steps) for name in names for seed in SEEDS]
    chosen.device = "cpu"
    report("moe_convergence", rows, chosen)


if __name__ == "__main__":
    main()
