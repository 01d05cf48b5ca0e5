"""Shapes of models, published or of a configuration, and the parameters and operations that follow from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..words import any_of, find, is_address


@dataclass(frozen=True)
class Model:
    """A decoder: ``layers`` blocks of attention and a gated feed-forward layer, an embedding and a head.

    With ``experts`` the feed-forward layers after the first ``dense_layers`` are mixtures: ``active_experts`` of width
    ``expert_hidden`` see each token, and ``shared_experts`` see all. ``attention`` is the number of weights of one
    layer's projections if they are not the four of grouped queries (latent attention).
    """

    name: str
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128  # head dim of the values
    key_dim: int = 128  # head dim of queries and keys
    attention: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_hidden: int = 0
    dense_layers: int = 0
    tied: bool = False  # the head is the embedding

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of one layer."""
        own = self.dim * (self.heads * (self.key_dim + self.head_dim) + self.kv_heads * 2 * self.head_dim)
        return self.attention or own

    @property
    def moe_layers(self) -> int:
        """Layers that hold experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_weights(self) -> int:
        """Weights of the routed experts of one layer."""
        return 3 * self.dim * self.expert_hidden * self.experts

    @property
    def layer_weights(self) -> float:
        """Weights of a layer, the mean over all, without routed experts."""
        mixture = self.dim * (3 * self.expert_hidden * self.shared_experts + self.experts)
        forward = (self.layers - self.moe_layers) * 3 * self.dim * self.hidden + self.moe_layers * mixture
        return self.attention_weights + forward / self.layers

    @property
    def active_layer_weights(self) -> float:
        """Weights of a layer that one token is multiplied with, the mean over all layers."""
        routed = 3 * self.dim * self.expert_hidden * self.active_experts
        return self.layer_weights + routed * self.moe_layers / self.layers

    @property
    def active_hidden(self) -> float:
        """Width of the feed-forward layer that one token sees, the mean over all layers."""
        mixture = self.expert_hidden * (self.active_experts + self.shared_experts)
        return ((self.layers - self.moe_layers) * self.hidden + self.moe_layers * mixture) / self.layers

    @property
    def parameters(self) -> float:
        """All weights, embedding and head among them; norms are left out."""
        return (
            self.layers * self.layer_weights
            + self.moe_layers * self.expert_weights
            + (2 - self.tied) * self.dim * self.vocabulary
        )

    def attention_flops(self, length: int) -> float:
        """Return operations of causal attention, per token and layer, forward: half of the full matrix."""
        return length * self.heads * (self.key_dim + self.head_dim)

    def flops(self, length: int) -> float:
        """Return operations a token of a step needs, forward and backward, without recomputation; what MFU counts."""
        weights = self.layers * self.active_layer_weights + self.dim * self.vocabulary
        return 6 * weights + 3 * self.layers * self.attention_flops(length)


# Llama 3: arXiv 2407.21783, table 3. DeepSeek-V3: arXiv 2412.19437, section 4.2; without the extra module that predicts
# a second token. Its latent attention has 1536 dims for queries, 512 for keys and values, 64 rotary ones.
_LATENT = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
MODELS = {
    "8b": Model("8b", 32, 4096, 14336, 32, 8, 128256),
    "70b": Model("70b", 80, 8192, 28672, 64, 8, 128256),
    "405b": Model("405b", 126, 16384, 53248, 128, 8, 128256),
    "671b": Model(
        "671b",
        61,
        7168,
        18432,
        128,
        128,
        129280,
        key_dim=192,
        attention=_LATENT,
        experts=256,
        active_experts=8,
        shared_experts=1,
        expert_hidden=2048,
        dense_layers=3,
    ),
}


def find_model(name: str) -> Model:
    """Return the shape of a published model, or of one's configuration; ValueError for what is neither."""
    path = Path(name)
    if name and name not in MODELS and (path.suffix == ".json" or path.exists()):
        return _read(path / "config.json" if path.is_dir() else path)
    known: dict[str, Any] = {**MODELS, "the path of a model's config.json": None}
    return find(name, known, "--model")


def _read(path: Path) -> Model:
    """Return the shape that Transformers' configuration of a decoder says.

    Raises:
        ValueError: it cannot be read, or does not say the shape.
    """
    try:
        found = json.loads(path.read_text())
        found |= found.get("text_config") or {}
        named = path.stem
        if path.name == "config.json":  # the current folder's name says nothing of the model
            named = path.parent.name.removeprefix("..") or found.get("model_type") or path.name
        return _shape_of(found, named)
    except KeyError as error:
        raise ValueError(
            f"--model is {path}, which has no {error.args[0]}; give the config.json of a model like Llama, Mixtral or "
            f"DeepSeek, or one of {any_of(MODELS)}"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or f"no configuration: {error}"
        why = "an address; download it first" if is_address(path) else why
        raise ValueError(
            f"--model is {path}, which cannot be read ({why}); give a model's config.json"
        ) from None


def _shape_of(found: dict[str, Any], name: str) -> Model:
    layers, dim, hidden = (found[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, width = found["num_attention_heads"], found.get("moe_intermediate_size") or hidden
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((found[key] for key in counts if found.get(key)), 0)
    every = found.get("interleave_moe_layer_step") or found.get("decoder_sparse_step") or 1
    dense = (
        found.get("first_k_dense_replace")
        or len(found.get("mlp_only_layers") or ())
        or layers - layers // every
    )
    shared = (found.get("shared_expert_intermediate_size") or 0) // width
    shared = shared or int(found.get("model_type", "").startswith("llama4"))  # each layer has one, unsaid
    head_dim = found.get("head_dim") or dim // heads
    key_dim, attention = head_dim, 0
    if latent := found.get("kv_lora_rank"):
        rotary, head_dim = found["qk_rope_head_dim"], found["v_head_dim"]
        key_dim = found["qk_nope_head_dim"] + rotary
        narrow = found.get("q_lora_rank")
        attention = dim * narrow + narrow * heads * key_dim if narrow else dim * heads * key_dim
        attention += (
            dim * (latent + rotary) + latent * heads * (key_dim - rotary + head_dim) + heads * head_dim * dim
        )
    return Model(
        name,
        layers,
        dim,
        found.get("intermediate_size_mlp") or hidden,
        heads,
        found.get("num_key_value_heads") or heads,
        found["vocab_size"],
        head_dim,
        key_dim,
        attention,
        experts,
        found["num_experts_per_tok"] if experts else 0,
        found.get("n_shared_experts") or shared,
        width if experts else 0,
        dense if experts else 0,
        bool(found.get("tie_word_embeddings")),
    )
