"""Trains Megatron-LM's GPTModel on one process, after ``install_transformer_engine()``; prints the losses."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

import narrowcast as nc

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(fused: bool = False, **options: Any) -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **options,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=fused)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32)
    assert isinstance(model.decoder.layers[0].self_attention.linear_qkv, nc.LayerNormLinear)
    return model


def train(model: GPTModel) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, positions, losses = torch.randint(128, (2, 32)), torch.arange(32).repeat(2, 1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
models = {"plain": build()}
for recipe in ("delayed", "tensorwise"):
    models[recipe] = build(fp8="hybrid", fp8_recipe=recipe)
    models[f"{recipe}, recomputed"] = build(fp8="hybrid", fp8_recipe=recipe, **FULL)
models["fused"] = build(True, fp8="hybrid", fp8_recipe="tensorwise")
results = {name: train(model) for name, model in models.items()}
print("results:", json.dumps({"graphs": cuda_graphs.HAVE_TE_GRAPHS, **results}))
dist.destroy_process_group()
