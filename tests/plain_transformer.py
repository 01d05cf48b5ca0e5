"""A Transformer layer in plain PyTorch, from a state dict with Transformer Engine's names: what the modules must equal.

One sequence after the other and one head after the other, in (s, hidden), so that it shares no layout with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


def norm(x: Tensor, state: State, name: str, options: dict[str, Any]) -> Tensor:
    gamma = state[f"{name}weight"] + (1.0 if options.get("zero_centered_gamma") else 0.0)
    eps = options.get("layernorm_epsilon", 1e-5)
    if options.get("normalization") == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma
    return F.layer_norm(x, x.shape[-1:], gamma, state[f"{name}bias"], eps)


def head_norm(x: Tensor, state: State, name: str, options: dict[str, Any]) -> Tensor:
    kind, eps = options.get("qk_norm_type"), options.get("qk_norm_eps", 1e-6)
    if kind is None:
        return x
    if kind == "L2Normalization":
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return norm(x, state, f"{name}.", {"normalization": kind, "layernorm_epsilon": eps})


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """One sequence of one head, (s, d), pair by pair; ``angles``: (positions, d')."""
    out = list(x.unbind(-1))
    turned = angles.shape[-1]
    for i in range(turned // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2)
        cos, sin = angles[: len(x), a].cos(), angles[: len(x), a].sin()
        out[a], out[b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return torch.stack(out, -1)


def projections(state: State, name: str, kinds: dict[str, int], dim: int, options: dict[str, Any]) -> State:
    """Weight and bias of each kind (heads of "query", "key", "value") out of one layer's parameters, in any layout."""
    found: State = {}
    groups = kinds.get("key", 1)
    for what in ("weight", "bias"):
        if f"{name}.{what}" not in state:
            for kind in kinds:
                if f"{name}.{kind}_{what}" in state:
                    found[f"{kind}_{what}"] = state[f"{name}.{kind}_{what}"]
            continue
        whole = state[f"{name}.{what}"]
        if options.get("qkv_weight_interleaved", True) and len(kinds) > 1:
            grouped = whole.reshape(groups, -1, dim, *whole.shape[1:])
            parts = grouped.split([heads // groups for heads in kinds.values()], 1)
            own = [part.reshape(-1, *whole.shape[1:]) for part in parts]
        else:
            own = list(whole.split([heads * dim for heads in kinds.values()]))
        found.update({f"{kind}_{what}": part for kind, part in zip(kinds, own)})
    return found


def linear(x: Tensor, parts: State, kind: str) -> Tensor:
    return F.linear(x, parts[f"{kind}_weight"], parts.get(f"{kind}_bias"))


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dim: int, causal: bool, turn: Callable[[Tensor, str], Tensor]
) -> Tensor:
    """(s, heads * d) of one sequence; a causal mask ends at the last query and key."""
    groups, outs = k.shape[-1] // dim, []
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)).logical_not().to(q.device)
    for head in range(heads):
        group = head // (heads // groups)
        query = turn(q[:, head * dim : (head + 1) * dim], "query")
        key = turn(k[:, group * dim : (group + 1) * dim], "key")
        scores = query @ key.T / math.sqrt(dim)
        if causal:
            scores = scores.masked_fill(hidden, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, group * dim : (group + 1) * dim])
    return torch.cat(outs, -1)


def attention(
    state: State,
    prefix: str,
    x: Tensor,
    heads: int,
    options: dict[str, Any],
    encoder: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and the norm's output (the input without a norm) of one sequence, (s, hidden)."""
    groups, dim = options.get("num_gqa_groups") or heads, options["dim"]
    front, kinds = ("qkv", {"query": heads, "key": groups, "value": groups})
    if encoder is not None:
        front, kinds = "query", {"query": heads}
    normalized, name = x, prefix + ("qkv" if front == "qkv" else "query_layer")
    if f"{prefix}layernorm_{front}.layer_norm_weight" in state:
        name = f"{prefix}layernorm_{front}"
        normalized = norm(x, state, f"{name}.layer_norm_", options)
    own = projections(state, name, kinds, dim, options)
    source = normalized
    if encoder is not None:
        both = {"key": groups, "value": groups}
        own.update(projections(state, f"{prefix}key_value", both, dim, options))
        source = encoder

    def turn(part: Tensor, kind: str) -> Tensor:
        before = options.get("qk_norm_before_rope")
        if before:
            part = head_norm(part, state, f"{prefix}{kind[0]}_norm", options)
        if angles is not None:
            part = rotated(part, angles[kind == "key"], options.get("rotary_pos_interleaved", False))
        return part if before else head_norm(part, state, f"{prefix}{kind[0]}_norm", options)

    q = linear(normalized, own, "query")
    k, v = linear(source, own, "key"), linear(source, own, "value")
    context = attend(q, k, v, heads, dim, encoder is None and options.get("causal", True), turn)
    return F.linear(context, state[f"{prefix}proj.weight"], state.get(f"{prefix}proj.bias")), normalized


def feed_forward(state: State, prefix: str, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and the norm's output."""
    normalized = norm(x, state, f"{prefix}layer_norm_", options)
    hidden = F.linear(normalized, state[f"{prefix}fc1_weight"], state.get(f"{prefix}fc1_bias"))
    if options.get("activation") == "swiglu":
        gate, up = hidden.chunk(2, -1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(hidden, approximate="tanh")
    return F.linear(hidden, state[f"{prefix}fc2_weight"], state.get(f"{prefix}fc2_bias")), normalized


def layer(
    state: State,
    x: Tensor,
    heads: int,
    options: dict[str, Any],
    encoder: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One sequence (s, hidden) through a whole layer without dropout."""
    post = options.get("apply_residual_connection_post_layernorm")
    out, normalized = attention(state, "self_attention.", x, heads, options, angles=angles)
    if options.get("parallel_attention_mlp"):
        return x + out + feed_forward(state, "layernorm_mlp.", x, options)[0]
    x = (normalized if post else x) + out
    if encoder is not None:
        out, normalized = attention(state, "inter_attention.", x, heads, options, encoder)
        x = (normalized if post else x) + out
    out, normalized = feed_forward(state, "layernorm_mlp.", x, options)
    x = (normalized if post else x) + out
    return norm(x, state, "layernorm.", options) if options.get("output_layernorm") else x
