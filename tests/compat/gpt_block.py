"""A GPT block in Megatron's style, written against Transformer Engine: nothing in it knows of narrowcast."""

from __future__ import annotations

import torch
import transformer_engine as te
from torch import Tensor, nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
)
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.fp8 import (
    FP8GlobalStateManager,
    fp8_autocast,
)

RECIPES = {
    "delayed": DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="most_recent"),
    "tensorwise": Float8CurrentScaling(fp8_format=Format.HYBRID),
}


class TENorm:
    """The instance is a module of Transformer Engine's, by the name in the configuration."""

    def __new__(cls, normalization: str, hidden_size: int, eps: float = 1e-5) -> nn.Module:
        kind = te.pytorch.RMSNorm if normalization == "RMSNorm" else te.pytorch.LayerNorm
        return kind(hidden_size=hidden_size, eps=eps, sequence_parallel=False, zero_centered_gamma=False)


class TELinear(te.pytorch.Linear):
    def __init__(self, rows: int, columns: int, *, parallel_mode: str | None, bias: bool) -> None:
        super().__init__(
            in_features=rows,
            out_features=columns,
            sequence_parallel=False,
            fuse_wgrad_accumulation=False,
            tp_group=None,
            tp_size=1,
            get_rng_state_tracker=None,
            init_method=lambda weight: nn.init.normal_(weight, std=0.05),
            bias=bias,
            return_bias=True,
            parallel_mode=parallel_mode,
            ub_overlap_ag=False,
            ub_overlap_rs=False,
            symmetric_ar_type=None,
        )
        self.is_first_microbatch = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        first = None if FP8GlobalStateManager.is_fp8_enabled() else self.is_first_microbatch
        return super().forward(x, is_first_microbatch=first)


class TELayerNormColumnParallelLinear(te.pytorch.LayerNormLinear):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(
            in_features=rows,
            out_features=columns,
            eps=1e-5,
            normalization="RMSNorm",
            bias=False,
            parallel_mode="column",
            return_bias=False,
            return_layernorm_output=False,
            zero_centered_gamma=False,
            tp_group=None,
            tp_size=1,
        )


class Block(nn.Module):
    def __init__(
        self, hidden: int = 64, heads: int = 4, groups: int = 2, normalization: str = "RMSNorm"
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.channels = heads, groups, hidden // heads
        self.linear_qkv = TELayerNormColumnParallelLinear(hidden, (heads + 2 * groups) * self.channels)
        self.core_attention = te.pytorch.DotProductAttention(
            num_attention_heads=heads,
            kv_channels=self.channels,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            attn_mask_type="causal",
            qkv_format="sbhd",
            sequence_parallel=False,
            tp_size=1,
            layer_number=1,
        )
        self.linear_proj = TELinear(hidden, hidden, parallel_mode="row", bias=True)
        self.pre_mlp_layernorm = TENorm(normalization, hidden)
        self.linear_fc1 = TELinear(hidden, 2 * hidden, parallel_mode="column", bias=False)
        self.linear_fc2 = TELinear(2 * hidden, hidden, parallel_mode="row", bias=True)
        angles = te.pytorch.RotaryPositionEmbedding(self.channels)(32).to(self.linear_proj.weight.device)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch = x.shape[:2]
        sizes = [count * self.channels for count in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.reshape(tokens, batch, -1, self.channels) for part in self.linear_qkv(x).split(sizes, dim=-1)
        )
        q, k = (
            te.pytorch.attention.apply_rotary_pos_emb(t, self.angles, tensor_format="sbhd", fused=True)
            for t in (q, k)
        )
        out, bias = self.linear_proj(self.core_attention(q, k, v))
        x = x + out + bias
        hidden, _ = self.linear_fc1(self.pre_mlp_layernorm(x))
        out, bias = self.linear_fc2(nn.functional.gelu(hidden))
        return x + out + bias


def train(
    block: nn.Module, x: Tensor, recipe: str, *, steps: int = 3, recompute: bool = False
) -> list[float]:
    """Losses of a few steps, as Megatron enters its context around a layer."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe], fp8_group=None):
            assert FP8GlobalStateManager.get_fp8_recipe() == RECIPES[recipe]
            out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
