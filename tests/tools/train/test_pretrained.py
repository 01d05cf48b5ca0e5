"""Fine-tuning all weights: a Llama that Transformers saved, bf16 weights, small optimizer state, the chunked loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowcast.testing import relative_error
from narrowcast_tools.train import checkpoint
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.model import Decoder, next_token_loss
from narrowcast_tools.train.pretrained import load, shape_of
from narrowcast_tools.train.progress import Progress
from narrowcast_tools.train.trainer import BETAS, Trainer

SHAPE = ModelConfig(dim=48, layers=2, heads=3, kv_heads=1, hidden=40, vocabulary=70, rope_theta=5e5)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "vocab_size": 70,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def write(folder: Path, config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """Write a Llama as Transformers does, in two files; return its tensors."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (70, 48), "model.norm": (48,), "lm_head": (70, 48)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (48,),
            "post_attention_layernorm": (48,),
            "self_attn.q_proj": (48, 48),
            "self_attn.k_proj": (16, 48),
            "self_attn.v_proj": (16, 48),
            "self_attn.o_proj": (48, 48),
            "mlp.gate_proj": (40, 48),
            "mlp.up_proj": (40, 48),
            "mlp.down_proj": (48, 40),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    return tensors


def test_every_tensor_finds_its_place(tmp_path: Path) -> None:
    """``tests/docs`` runs a Llama of Transformers; logits equal to 2e-7 were seen by hand."""
    tensors = write(tmp_path)
    shape = shape_of(tmp_path, ModelConfig())
    assert shape == SHAPE
    model = Decoder(shape, 8)
    load(model, shape, tmp_path)
    layer = {name.split(".", 3)[3]: value for name, value in tensors.items() if ".layers.1." in name}
    block: Any = model.blocks[1]
    qkv = torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(block.attention.qkv.weight, qkv)
    gate_up = torch.cat([layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(block.feed_forward.gate_up.weight, gate_up)
    assert torch.equal(block.feed_forward_norm.weight, layer["post_attention_layernorm.weight"])
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])
    first = Decoder(replace(shape, layers=1), 8)  # --layers 1
    load(first, replace(shape, layers=1), tmp_path)
    assert torch.equal(first.blocks[0].attention.proj.weight, model.blocks[0].attention.proj.weight)  # type: ignore[union-attr]


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"--init is .*, which has no config.json; give random, or the folder"
    ):
        shape_of(tmp_path, ModelConfig())
    write(tmp_path, {**CONFIG, "attention_bias": True})
    with pytest.raises(SettingsError, match="has attention_bias True; --init takes a Llama with False"):
        shape_of(tmp_path, ModelConfig())
    write(tmp_path)
    (tmp_path / "model-0.safetensors").unlink()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").touch()
    told = r"--init: .* has 'pytorch_model.bin' and no safetensors file; .*save_file\(torch.load\("
    with pytest.raises(SettingsError, match=told):
        load(Decoder(SHAPE, 8), SHAPE, pickled)
    with pytest.raises(SettingsError, match="lacks 9 tensors, lm_head.weight among them"):
        load(Decoder(SHAPE, 8), SHAPE, tmp_path)
    wide = replace(SHAPE, hidden=48)
    with pytest.raises(SettingsError, match="of shape .*, and the model has shape"):
        load(Decoder(wide, 8), wide, tmp_path)


def test_the_chunked_loss_is_the_loss() -> None:
    torch.manual_seed(0)
    plain, chunked = Decoder(SHAPE, 8), Decoder(SHAPE, 8, chunked_loss=True)
    chunked.load_state_dict(plain.state_dict())
    tokens = torch.arange(16).view(2, 8)
    losses = [next_token_loss(model, tokens, tokens + 1) for model in (plain, chunked)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class MasterCopies:
    """PyTorch's AdamW on fp32 copies of a trainer's bf16 weights, as a yardstick."""

    def __init__(self, trained: torch.optim.Optimizer) -> None:
        self.param_groups = trained.param_groups
        self.copies = [[p.detach().float() for p in group["params"]] for group in self.param_groups]
        decays = [
            {"params": own, "weight_decay": g["weight_decay"]}
            for own, g in zip(self.copies, self.param_groups)
        ]
        self.inner = torch.optim.AdamW(decays, betas=BETAS)

    def step(self) -> None:
        for own, copies, group in zip(self.param_groups, self.copies, self.inner.param_groups):
            group["lr"] = own["lr"]
            for parameter, copied in zip(own["params"], copies):
                copied.grad = parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for own, copies in zip(self.param_groups, self.copies):
                for parameter, copied in zip(own["params"], copies):
                    parameter.copy_(copied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def test_fused_optimizers_train_as_fp32_masters_do_and_bf16_weights_do_not(
    config: TrainConfig, corpus: Corpus
) -> None:
    def trained(optimizer: str, copies: bool = False) -> tuple[list[float], Tensor]:
        small = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=40)
        small_config = replace(config, model=small, optimizer=optimizer, lr=5e-5, warmup=2, steps=100)
        run = Trainer(small_config, corpus)
        if copies:
            run.optimizer = MasterCopies(run.optimizer)  # type: ignore[assignment]
        first = run.model.head.weight.detach().clone()
        losses = [run.step(index).item() for index in range(4)]
        return losses, run.model.head.weight.detach().float() - first.float()

    losses, moved = trained("fused-bf16", copies=True)
    for optimizer in ("fused-bf16", "fused-int8"):
        own_losses, own_moved = trained(optimizer)
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert relative_error(own_moved, moved) < 0.08  # codes of moments round by 1 to 2%
    assert relative_error(trained("adamw-bf16")[1], moved) > 0.2  # rounds updates away


@pytest.mark.parametrize("optimizer", ["adamw-bf16", "fused-int8", "fused-stochastic"])
def test_a_run_with_bf16_weights_learns_and_goes_on(
    optimizer: str, config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    config = replace(config, optimizer=optimizer, chunked_loss=True, recompute=True, recipe="current")
    if optimizer == "fused-stochastic":  # as --preset 8b
        config = replace(
            config,
            recompute=False,
            saved_activations="fp8",
            step_in_backward=True,
            clip=math.inf,
            recipe="delayed",
        )
    whole = Run(config, corpus, progress, folder=tmp_path / "whole")
    assert {p.dtype for p in whole.trainer.model.parameters()} == {torch.bfloat16}
    losses = whole.train().history.train
    assert losses[-1] < losses[0]
    Run(replace(config, steps=6), corpus, progress, folder=tmp_path / "parts").train()
    (last,) = [path for path in checkpoint.steps_in(tmp_path / "parts") if path.name.endswith("6")]
    last.rename(tmp_path / "gone")
    again = Run(config, corpus, progress, folder=tmp_path / "parts", resume=True).train().history.train
    assert again == losses


def test_the_chunked_loss_has_the_recipe_of_the_head(config: TrainConfig, corpus: Corpus) -> None:
    chunked = replace(config, chunked_loss=True)
    losses = {}
    for head in ("bf16", "current"):
        trainer = Trainer(replace(chunked, head_recipe=head), corpus)
        losses[head] = trainer.step(0).item()
    whole = Trainer(replace(config, head_recipe="current"), corpus).step(0).item()
    assert losses["current"] != losses["bf16"]
    assert losses["current"] == pytest.approx(whole, rel=1e-4)
    with pytest.raises(SettingsError, match="--chunked-loss keeps no scales from step to step"):
        Trainer(replace(chunked, head_recipe="delayed"), corpus)
    with pytest.raises(
        SettingsError, match="--optimizer is 'adam'; the nearest: 'adamw'; use one of adamw, "
    ):
        replace(config, optimizer="adam")
