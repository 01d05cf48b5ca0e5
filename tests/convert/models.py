"""Models as their users wrote them, and parts that look like those of Transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention-free residual block: two projections that share an input, and a way back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y) * torch.sigmoid(self.gate(y)))


class Model(nn.Module):
    """Tied embedding and head, two blocks."""

    def __init__(self, width: int = 32, words: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Conv1D(nn.Module):
    """As Transformers has it for GPT-2: a linear layer with its weight transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(0, -2) @ self.weight + self.bias).view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """As Transformers 5 has them: 3-D weights, and what they say of themselves."""

    def __init__(
        self, experts: int = 4, width: int = 32, inner: int = 48, transposed: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.has_bias = experts, transposed, bias
        self.has_gate, self.has_post_expert_norm, self.top_k = True, False, 2
        shapes = (2 * inner, width), (width, inner)
        for name, shape in zip(("gate_up_proj", "down_proj"), shapes):
            size = shape[::-1] if transposed else shape
            setattr(self, name, nn.Parameter(torch.randn(experts, *size) * 0.1))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(experts, shape[0]) * 0.1))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.t())
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, position = torch.where(top_k_index == expert)
            y = self._apply_gate(self._linear("gate_up_proj", expert, hidden_states[token]))
            y = self._linear("down_proj", expert, y) * top_k_weights[token, position, None]
            out = out.index_add(0, token, y)
        return out


def route(tokens: int, experts: int, chosen: int = 2) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights, without a router."""
    index = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
    return index, torch.rand(tokens, chosen)


class Gate(nn.Module):
    """As HunYuan, Switch and JetMoE have it: the router's linear layer is a module's only one."""

    def __init__(self, name: str, width: int, experts: int) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(width, experts, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


class Mixture(nn.Module):
    """A mixture of experts; ``gate``: its router. ``kind``: how the experts are held."""

    def __init__(self, gate: nn.Module, kind: str = "list", experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.gate, self.shared_expert_gate = gate, nn.Linear(width, 1, bias=False)
        self.shared = nn.Linear(width, width)
        self.experts: nn.Module
        if kind == "list":
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        elif kind == "dict":
            self.experts = nn.ModuleDict({f"e{i}": nn.Linear(width, width) for i in range(experts)})
        elif kind == "stacked":
            self.experts = Experts(experts, width)
        else:
            self.w1 = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        if hasattr(self, "w1"):
            outs = torch.einsum("ti,eoi->eto", x, self.w1)
        elif isinstance(self.experts, Experts):
            return self.experts(x, index, weights) + self.shared_expert_gate(x).sigmoid() * self.shared(x)
        else:
            experts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
            outs = torch.stack([expert(x) for expert in experts])  # type: ignore[union-attr]
        chosen = outs.transpose(0, 1).gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
        return (chosen * weights[..., None]).sum(1) + self.shared_expert_gate(x).sigmoid() * self.shared(x)


class Llama4TextExperts(nn.Module):
    """As Transformers has them for Llama 4: every expert multiplies every token, in (E, K, N) weights."""

    def __init__(self, experts: int = 4, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, width, 2 * inner) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, inner, width) * 0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        gate, up = (x @ self.gate_up_proj).chunk(2, dim=-1)
        return ((up * self.act_fn(gate)) @ self.down_proj).flatten(0, 1)


class JetMoeParallelExperts(nn.Module):
    """As Transformers has them for JetMoE: one linear layer per expert, on rows that are sorted."""

    def __init__(self, experts: int = 4, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, inner, width) * 0.1)

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        return torch.cat([x @ w.t() for x, w in zip(inputs.split(expert_size), self.weight)])


class MambaMixer(nn.Module):
    """As state-space mixers have it: the weight of the step's projection is multiplied, the layer never called."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.A_log, self.dt_proj = nn.Parameter(torch.randn(width, 4)), nn.Linear(width, width)
        self.in_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.in_proj(x) @ self.dt_proj.weight.t() + self.dt_proj.bias
