"""Weights of a Llama that Transformers has saved: the shape of the model, and its tensors in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast._checks import shown
from narrowcast.serving.load import only_pickles

from .asked import CONFIG, config_text
from .config import ModelConfig
from .errors import SettingsError
from .model import NORM_EPS, Decoder

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_OUTER = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}
_INNER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.o_proj": "attention.proj",
    "mlp.down_proj": "feed_forward.down",
}


def shape_of(folder: Path, start: ModelConfig) -> ModelConfig:
    """Return the shape of the model in a folder.

    Raises:
        SettingsError: there is none, or it is no Llama as `Decoder` has it; the message names the field.
    """
    try:
        found: dict[str, Any] = json.loads(config_text(folder))
    except ValueError as error:
        raise SettingsError(
            f"--init: {folder / CONFIG} is not JSON ({error}); save the model again"
        ) from error
    heads = found.get("num_attention_heads", 0)
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    fixed = {
        "model_type": (found.get("model_type"), "llama"),
        "hidden_act": (found.get("hidden_act", "silu"), "silu"),
        "attention_bias": (found.get("attention_bias", False), False),
        "mlp_bias": (found.get("mlp_bias", False), False),
        "rms_norm_eps": (found.get("rms_norm_eps", NORM_EPS), NORM_EPS),
        "rope_scaling": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "head_dim": (found.get("head_dim") or found["hidden_size"] // heads, found["hidden_size"] // heads),
    }
    for name, (value, accepted) in fixed.items():
        if value != accepted:
            raise SettingsError(
                f"{folder / CONFIG} has {name} {shown(value)}; --init takes a Llama with {shown(accepted)}, others "
                "are trained with nc.convert and a trainer of yours"
            )
    return replace(
        start,
        dim=found["hidden_size"],
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        hidden=found["intermediate_size"],
        tie_embeddings=found.get("tie_word_embeddings", False),
        vocabulary=found["vocab_size"],
        rope_theta=float(rope.get("rope_theta", found.get("rope_theta", 10_000.0))),
    )


@torch.no_grad()
def load(model: Decoder, config: ModelConfig, folder: Path) -> None:
    """Copy the tensors of a folder into a model; layers past the model's are left out.

    Raises:
        SettingsError: a tensor is missing, left over, or of another shape.
    """
    if told := only_pickles(folder):
        raise SettingsError(f"--init: {told}")
    places = dict(_places(model, config))
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in _tensors(path):
            layer = _LAYER.fullmatch(name)
            if layer and int(layer[1]) >= config.layers:
                continue
            if name == "lm_head.weight" and config.tie_embeddings:
                continue
            place = places.pop(name, None)
            if place is None or place.shape != value.shape:
                wanted = "no such tensor" if place is None else f"shape {tuple(place.shape)}"
                raise SettingsError(
                    f"{path} has {name} of shape {tuple(value.shape)}, and the model has {wanted}; give --init "
                    "the folder of a Llama as its config.json says"
                )
            place.copy_(value)
    if places:
        raise SettingsError(
            f"{folder} lacks {len(places)} tensors, {min(places)} among them; give --init a folder with safetensors "
            "of the whole model"
        )


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open  # type: ignore[import-not-found]

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dict
            yield name, file.get_tensor(name)


def _places(model: Decoder, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield Transformers' name of every tensor, and where the model has it; parts of joined projections are rows."""
    for theirs, ours in _OUTER.items():
        if ours != "head" or not config.tie_embeddings:
            yield theirs, model.get_submodule(ours).weight  # type: ignore[misc]
    head_dim = config.dim // config.heads
    rows = [config.heads * head_dim, *2 * [config.kv_heads * head_dim]]
    for number, block in enumerate(model.blocks):
        before: Any = f"model.layers.{number}."
        for theirs, ours in _INNER.items():
            yield f"{before}{theirs}.weight", block.get_submodule(ours).weight  # type: ignore[misc]
        qkv: Any = block.get_submodule("attention.qkv").weight
        for part, value in zip("qkv", qkv.split(rows)):
            yield f"{before}self_attn.{part}_proj.weight", value
        gate_up: Any = block.get_submodule("feed_forward.gate_up").weight
        for part, value in zip(("gate", "up"), gate_up.chunk(2)):
            yield f"{before}mlp.{part}_proj.weight", value
