"""Workloads: linear layers, a feed-forward block, grouped layers, and training steps of Llama-like models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast import renew_delayed_scaling
from narrowcast.losses import linear_cross_entropy
from narrowcast.optimizers import FusedAdam
from narrowcast.recipe import Recipe

from . import asked
from .asked import Work

BF16 = torch.bfloat16
VOCABULARY = 32000
RATE = 3e-4
BLOCKS_AT_ONCE = 4  # of a model that is compiled in parts
Step = Callable[[], Any]


def build(work: Work, layers: Any, device: str, head: Recipe | None = None) -> nn.Module:
    """Return the module of a work.

    Args:
        layers: what has ``Linear``, ``LayerNormMLP`` and so on, this package or Transformer Engine's; None for plain
            PyTorch.
        head: the recipe of a model's head; None for bf16.
    """
    if work.kind == "model":
        return _Model(work.sizes, layers, device, head)
    _, width, features, *groups = work.sizes
    place: dict[str, Any] = {"device": device, "bias": False}
    if layers is None:
        if work.kind == "linear":
            return nn.Linear(width, features, dtype=BF16, **place)
        return (
            _Experts(groups[0], width, features, device) if groups else _FeedForward(width, features, device)
        )
    if work.kind == "linear":
        return layers.Linear(width, features, params_dtype=BF16, **place)
    if groups:
        return layers.GroupedLinear(groups[0], width, features, params_dtype=BF16, **place)
    options = {"normalization": "RMSNorm", "activation": "swiglu", "params_dtype": BF16}
    return layers.LayerNormMLP(width, features, **options, **place)


def _adamw(module: nn.Module, device: str, capturable: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RATE, fused=device == "cuda", capturable=capturable)


def _fused_adam(module: nn.Module, device: str, capturable: bool) -> torch.optim.Optimizer:
    """Return narrowcast's AdamW with the decay and the moments of PyTorch's, which are in the parameters' dtype.

    It writes the codes of the weights.
    """
    moments: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    options = {"weight_decay": 0.01, "capturable": capturable, "weight_codes": module, **moments}
    return FusedAdam(module.parameters(), lr=RATE, **options)


OPTIMIZERS = dict(zip(asked.OPTIMIZERS, (_adamw, _fused_adam)))
"""PyTorch's, fused on a GPU, and narrowcast's; they store the same bytes."""


def phases_of(
    work: Work,
    module: nn.Module,
    run: Callable[..., Tensor],
    device: str,
    *,
    capturable: bool = False,
    optimizer: str = "AdamW",
) -> tuple[tuple[str, Step], ...]:
    """Return the training step of a model in three named parts, which run in turn: forward, backward, optimizer.

    Args:
        run: the module or what was compiled of it.
        capturable: whether the optimizer's step may be part of a CUDA graph.
        optimizer: of ``OPTIMIZERS``.
    """
    *_, batch, length = work.sizes
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), device=device, generator=generator)
    given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    stepped = OPTIMIZERS[optimizer](module, device, capturable)
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(run(given, wanted))

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        stepped.step()
        stepped.zero_grad(set_to_none=True)

    return ("forward", forward), ("backward", backward), ("optimizer", update)


def step_of(
    work: Work, module: nn.Module, run: Callable[..., Tensor], device: str, optimizer: str = "AdamW"
) -> Step:
    """Return a training step: of a layer forward and backward, of a model with the optimizer.

    Args:
        run: the module or what was compiled of it.
        optimizer: of ``OPTIMIZERS``.
    """
    if work.kind == "model":
        phases = phases_of(work, module, run, device, optimizer=optimizer)

        def train() -> None:
            for _, phase in phases:
                phase()

        return train
    generator = torch.Generator(device).manual_seed(1)
    rows, width, features, *groups = work.sizes
    x = (
        torch.randn(rows, width, dtype=torch.float32, device=device, generator=generator)
        .to(BF16)
        .requires_grad_()
    )
    out = width if work.kind == "feed-forward" else features
    grad = torch.randn(rows, out, dtype=torch.float32, device=device, generator=generator).to(BF16)
    splits = [[rows // groups[0]] * groups[0]] if groups else []

    def forward_and_backward() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        run(x, *splits).backward(grad)
        if any(layer.delayed_slots() for layer in delayed):
            renew_delayed_scaling(module)  # as an optimizer's step does

    delayed: list[Any] = [layer for layer in module.modules() if hasattr(layer, "delayed_slots")]
    return forward_and_backward


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, device: str) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": BF16}
        self.norm = nn.RMSNorm(width, **place)
        self.up = nn.Linear(width, 2 * hidden, bias=False, **place)
        self.down = nn.Linear(hidden, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        gate, linear = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * linear)


class _Experts(nn.Module):
    def __init__(self, groups: int, width: int, features: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(groups, features, width, dtype=torch.float32, device=device).mul_(0.02).to(BF16)
        )

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        if not x.is_cuda:
            return torch.cat([F.linear(part, own) for part, own in zip(x.split(splits), self.weight)])
        ends = torch.arange(1, len(splits) + 1, device=x.device, dtype=torch.int32) * splits[0]
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class _Attention(nn.Module):
    def __init__(self, sizes: tuple[int, ...], device: str) -> None:
        super().__init__()
        _, width, _, self.heads, self.key_heads, *_ = sizes
        self.size = width // self.heads
        features = (self.heads + 2 * self.key_heads) * self.size
        place: dict[str, Any] = {"device": device, "dtype": BF16}
        self.norm = nn.RMSNorm(width, **place)
        self.qkv = nn.Linear(width, features, bias=False, **place)
        self.out = nn.Linear(width, width, bias=False, **place)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        counts = (self.heads, self.key_heads, self.key_heads)
        parts = self.qkv(self.norm(x)).split([count * self.size for count in counts], -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = _turned(q, cosine, sine), _turned(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class _Block(nn.Module):
    """Attention and feed-forward block of plain PyTorch."""

    def __init__(self, sizes: tuple[int, ...], device: str) -> None:
        super().__init__()
        _, width, hidden, *_ = sizes
        self.attention = _Attention(sizes, device)
        self.feed_forward = _FeedForward(width, hidden, device)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(x, cosine, sine)
        return x + self.feed_forward(x)


def _block(sizes: tuple[int, ...], layers: Any, device: str) -> nn.Module:
    if layers is None:
        return _Block(sizes, device)
    _, width, hidden, heads, key_heads, *_ = sizes
    return layers.TransformerLayer(
        width,
        hidden,
        heads,
        key_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format="bshd",
        params_dtype=BF16,
        device=device,
    )


class _Blocks(nn.Module):
    """Consecutive blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, **positions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, **positions)
        return x


class _Loss(nn.Module):
    """The last norm, the head, in bf16 unless it has a recipe, and the loss."""

    def __init__(self, width: int, recipe: Recipe | None, **place: Any) -> None:
        super().__init__()
        self.recipe = recipe
        self.norm, self.head = nn.RMSNorm(width, **place), nn.Linear(width, VOCABULARY, bias=False, **place)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        if self.recipe is not None:
            options: dict[str, Any] = {"chunk_size": VOCABULARY, "recipe": self.recipe}
            return linear_cross_entropy(self.norm(x), self.head.weight, wanted, **options)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, wanted.flatten())


class _Model(nn.Module):
    """A Llama-like language model with its loss; the embedding in bf16."""

    def __init__(self, sizes: tuple[int, ...], layers: Any, device: str, head: Recipe | None = None) -> None:
        super().__init__()
        count, width, _, heads, *_, length = sizes
        place: dict[str, Any] = {"device": device, "dtype": BF16}
        self.embedding = nn.Embedding(VOCABULARY, width, **place)
        blocks = [_block(sizes, layers, device) for _ in range(count)]
        self.parts = nn.ModuleList(
            _Blocks(blocks[at : at + BLOCKS_AT_ONCE]) for at in range(0, count, BLOCKS_AT_ONCE)
        )
        self.loss = _Loss(width, head, **place)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        half = torch.arange(0, width // heads, 2, device=device) / (width // heads)
        angles = torch.outer(torch.arange(length, device=device).float(), 10000.0**-half)
        if layers is None:
            positions = {"cosine": angles.cos().to(BF16), "sine": angles.sin().to(BF16)}
        else:
            positions = {"rotary_pos_emb": torch.cat([angles, angles], -1)[:, None, None]}
        for name, tensor in positions.items():
            self.register_buffer(name, tensor, persistent=False)
        self.positions = tuple(positions)

    def compile_parts(self) -> None:
        """Compile blocks and loss apart: what is compiled of some blocks serves the others, too."""
        for part in (*self.parts, self.loss):  # PyTorch 2.13 compiles no module of its own so
            part.compile(fullgraph=True)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.embedding(tokens)
        positions = {name: getattr(self, name) for name in self.positions}
        for part in self.parts:
            x = part(x, **positions)
        return self.loss(x, wanted)
