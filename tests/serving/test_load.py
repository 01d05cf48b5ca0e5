"""FP8 checkpoints of others, kept as they are stored: the same codes, outputs and gradients, from any device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recipes import DEVICE, QUANTIZED
from torch import nn

import narrowcast as nc

from .test_export import stack, trained

KINDS = {"block": "hf-fp8-block128", "current": "compressed-tensors"}


def saved(name: str, folder: Path) -> tuple[Any, Path]:
    model = trained(QUANTIZED[name], 160, 224, 96)
    return model, nc.export(model, folder / name, format=KINDS[name]).path


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("meta", [False, True])
def test_a_loaded_model_is_the_exported_one(name: str, meta: bool, tmp_path: Path) -> None:
    model, path = saved(name, tmp_path)
    again = stack(160, 224, 96)
    again = again.to("meta") if meta else again
    receipt = nc.load_quantized(again, path)
    again.to(DEVICE)
    assert all(one.stored for one in receipt.gemms)
    x = torch.randn(32, 160, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert torch.equal(again(ours), model(theirs))
    again(ours).float().square().sum().backward()
    model(theirs).float().square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    held: Any = again[0].weight
    codes = held._data if name == "current" else held._rowwise_data
    assert torch.equal(codes.cpu(), tensors["0.weight"].view(torch.uint8))
    assert not again[0].weight.requires_grad and again[0].bias.requires_grad


def test_compressed_tensors_tiles_are_read_too(tmp_path: Path) -> None:
    model = trained(QUANTIZED["block"], 160, 224)
    path = nc.export(model, tmp_path / "out", format="compressed-tensors").path
    again = stack(160, 224)
    nc.load_quantized(again, path)
    x = torch.randn(8, 160, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))


def test_ties_and_buffers_on_the_meta_device(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(64, 128), nn.BatchNorm1d(128)
            self.body, self.head = nn.Linear(128, 128), nn.Linear(128, 64, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    nc.convert(model, QUANTIZED["current"], only="body")
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    model.head = nn.Linear(128, 64, bias=False)  # a file of safetensors names what is tied once
    path = nc.export(model, tmp_path / "out", format="compressed-tensors").path
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["head.weight"]
    safetensors.torch.save_file(tensors, file)
    with torch.device("meta"):
        again = Tied()
    nc.load_quantized(again, path)
    assert again.head.weight is again.embed.weight and torch.equal(again.embed.weight, state["embed.weight"])
    assert torch.equal(again.norm.running_var, state["norm.running_var"])
    assert not any(parameter.is_meta for parameter in again.parameters())


def test_a_buffer_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    model = stack(160, 224, 96).to("meta")
    model.register_buffer("table", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match=r"buffers \['table'\] are on the meta device"):
        nc.load_quantized(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    model = stack(160, 224, 96)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = nn.Sequential(*model, nn.Linear(96, 8, device=DEVICE, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"lacks \['2.weight', '2.bias'\]"):
        nc.load_quantized(other, path)
    with pytest.raises(ValueError, match="those of Float8CurrentScaling"):
        nc.load_quantized(model, path, QUANTIZED["block"])
    with pytest.raises(ValueError, match=r"\(224, 160\) in the checkpoint"):
        nc.load_quantized(stack(160, 200, 96), path)
    config = path / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="load_quantized reads FP8"):
        nc.load_quantized(model, path)
    config.unlink()
    with pytest.raises(FileNotFoundError):
        nc.load_quantized(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(layer) is nn.Linear for layer in model)
