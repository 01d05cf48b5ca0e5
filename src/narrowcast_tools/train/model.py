"""A small Llama-style decoder whose every linear layer is narrowcast's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc

from .config import ModelConfig

INIT_STD = 0.02
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Generation:
    """The state kept between steps of generating.

    Args:
        cache: keys and values of earlier tokens.
        first: quantize the weights, and keep what comes of it for the steps after; False in those.
    """

    cache: nc.InferenceParams
    first: bool


def rope_tables(seq_len: int, head_dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary position embedding.

    Args:
        seq_len: positions.
        head_dim: width of a head, even.
        theta: base of the frequencies.

    Returns:
        two float32 tensors (seq_len, head_dim / 2).
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    Args:
        x: (batch, heads, seq_len, head_dim).
        cos: (seq_len, head_dim / 2), float32; or (batch, 1, seq_len, head_dim / 2), of positions that differ.
        sin: like `cos`.

    Numerics: float32, rounded once to the dtype of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; the query, key and value projections are one linear layer."""

    def __init__(self, config: ModelConfig, name: str, number: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.splits = [config.heads, config.kv_heads, config.kv_heads]
        self.grouped = config.heads != config.kv_heads
        self.qkv = nc.Linear(
            config.dim, sum(self.splits) * self.head_dim, bias=False, name=f"{name}.qkv", **place
        )
        self.proj = nc.Linear(config.dim, config.dim, bias=False, name=f"{name}.proj", **place)
        self.cached = nc.DotProductAttention(
            config.heads,
            self.head_dim,
            num_gqa_groups=config.kv_heads,
            qkv_format="bshd",
            attn_mask_type="padding_causal",
            layer_number=number,
        )

    def forward(
        self, x: Tensor, norm: nn.Module, cos: Tensor, sin: Tensor, generation: Generation | None = None
    ) -> Tensor:
        first = None if generation is None else generation.first
        heads = nc.nn.norm_linear(norm, self.qkv, x, first)
        heads = heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.splits, dim=1)  # (batch, heads, seq, head_dim)
        v = v.contiguous()  # else the attention keeps all that it is a part of
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if generation is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
            out = out.transpose(1, 2).flatten(-2)
        else:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            out = self.cached(q, k, v, inference_params=generation.cache)
        return self.proj(out, is_first_microbatch=first)


class FeedForward(nn.Module):
    """SwiGLU; the gate and up projections are one linear layer."""

    def __init__(self, config: ModelConfig, name: str, place: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up = nc.Linear(config.dim, 2 * config.hidden, bias=False, name=f"{name}.gate_up", **place)
        self.down = nc.Linear(config.hidden, config.dim, bias=False, name=f"{name}.down", **place)

    def forward(self, x: Tensor, norm: nn.Module, residual: Tensor, first: bool | None = None) -> Tensor:
        out, x = nc.nn.norm_mlp(norm, self.gate_up, self.down, x, first, residual=residual)
        return x + out


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, number: int, place: dict[str, Any]) -> None:
        super().__init__()
        name = f"blocks.{number}"
        self.attention_norm = nn.RMSNorm(config.dim, eps=NORM_EPS, **place)
        self.attention = Attention(config, f"{name}.attention", number + 1, place)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=NORM_EPS, **place)
        self.feed_forward = FeedForward(config, f"{name}.feed_forward", place)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, generation: Generation | None = None) -> Tensor:
        first = None if generation is None else generation.first
        attended = self.attention(x, self.attention_norm, cos, sin, generation)
        return self.feed_forward(attended, self.feed_forward_norm, x, first)


class Decoder(nn.Module):
    """Tokens in, scores of the next token out.

    Args:
        config: shape of the model.
        seq_len: longest sequence, which sizes the rotary tables.
        recompute: keep only each block's input for the backward, and run the block again there.
        chunked_loss: `forward` returns the loss of given targets without storing the scores.
        device, dtype: of the parameters.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        *,
        recompute: bool = False,
        chunked_loss: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.recompute, self.chunked_loss = recompute, chunked_loss
        self.loss_recipe: nc.recipe.Recipe | None = None  # of the chunked loss, which does not call the head
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocabulary, config.dim, **place)
        self.blocks = nn.ModuleList(Block(config, i, place) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS, **place)
        self.head = nc.Linear(config.dim, config.vocabulary, bias=False, name="head", **place)
        cos, sin = rope_tables(seq_len, config.dim // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize(config)
        if config.tie_embeddings:
            assert isinstance(self.embedding.weight, nn.Parameter)
            self.head.weight = self.embedding.weight

    def _initialize(self, config: ModelConfig) -> None:
        # What writes to the residual stream starts smaller, so that its variance does not grow with depth.
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)

    def forward(
        self, tokens: Tensor, generation: Generation | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Score the next token at every position.

        Args:
            tokens: int64 (batch, length), length at most `seq_len`.
            generation: what earlier tokens left, which these follow.
            targets: like `tokens`.

        Returns:
            (batch, length, vocabulary) in the dtype of the linear layers; with targets the mean loss, float32.
        """
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        if generation is not None:
            before = generation.cache.get_seqlens_pre_step()
            positions = before[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = nc.checkpoint(block, x, cos, sin)
            else:
                x = block(x, cos, sin, generation)
        if targets is not None:
            hidden = self.norm(x)
            return nc.linear_cross_entropy(hidden, self.head.weight, targets, recipe=self.loss_recipe)
        return self.head(self.norm(x), is_first_microbatch=None if generation is None else generation.first)


def next_token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token, in nats, as a float32 scalar.

    Args:
        model: a `Decoder`.
        tokens: int64 (batch, length).
        targets: like `tokens`.
    """
    if getattr(model, "chunked_loss", False):
        return model(tokens, targets=targets)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
