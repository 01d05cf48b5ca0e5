"""A Mixtral-style model: attention, and a router that sends every token to two of eight experts.

On a GPU a whole step, optimizer included, is captured as a CUDA graph: nothing in it is read back from the device.

Run: python examples/14_mixture_of_experts.py
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc

ALIGN = 16  # rows of an expert that FP8 GEMMs take at a time


class MoE(nn.Module):
    """SwiGLU experts, each token's result weighted by the router."""

    def __init__(self, width: int, hidden: int, experts: int, topk: int) -> None:
        super().__init__()
        self.experts, self.topk = experts, topk
        self.gate = nn.Linear(width, experts, bias=False)  # small, with discrete decisions: not quantized
        self.up = nc.GroupedLinear(experts, width, 2 * hidden, bias=False)
        self.down = nc.GroupedLinear(experts, hidden, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens).float()
        probs, routing = nc.fused_topk_with_score_function(logits, self.topk)
        counts = routing.sum(0)
        enough = tokens.shape[0] * self.topk + self.experts * (ALIGN - 1)
        rows, weights, row_map, offsets, splits = nc.moe_permute_and_pad_with_probs(
            tokens, probs, routing, counts, ALIGN, num_out_tokens=enough
        )
        gate, up = self.up(rows, splits).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * weights.unsqueeze(1).to(x.dtype)
        out = nc.moe_unpermute(self.down(hidden, splits), row_map, pad_offsets=offsets)
        _, scores = nc.fused_compute_score_for_moe_aux_loss(logits, self.topk, "softmax")
        balance = nc.fused_moe_aux_loss(scores, counts, tokens.shape[0], self.experts, self.topk, 0.01)
        return out.view_as(x), balance


class Block(nn.Module):
    """Causal attention, then the experts."""

    def __init__(self, width: int, heads: int, experts: int, topk: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nc.LayerNormLinear(width, 3 * width, normalization="RMSNorm", bias=False)
        self.proj = nc.Linear(width, width, bias=False)
        self.norm = nc.RMSNorm(width)
        self.moe = MoE(width, 2 * width, experts, topk)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        out, balance = self.moe(self.norm(x))
        return x + out, balance


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self, width: int = 64, depth: int = 2, heads: int = 2, experts: int = 8, topk: int = 2
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, topk) for _ in range(depth))
        self.norm, self.head = nc.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch (batch, length + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position.weight[: inputs.shape[1]]
        balance = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten()) + balance


def make_step(model: nn.Module, batch: Tensor) -> Callable[[], Tensor]:
    """Return a function that trains on ``batch`` and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, capturable=batch.is_cuda)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the step as a CUDA graph, after three real steps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def main() -> None:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    place = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {"device": "cpu"}
    model = Model().to(**place)
    nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
    text = torch.tensor(list(Path(__file__).read_bytes()))
    batch = torch.empty(8, 65, dtype=torch.int64, device=place["device"])
    step = make_step(model, batch)
    for number in range(20):
        starts = torch.randint(len(text) - 65, (8, 1))
        batch.copy_(text[starts + torch.arange(65)])
        if number == 0 and on_gpu:
            step = captured(step)
        loss = step()
        if number % 5 == 4:
            print(f"step {number + 1}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
