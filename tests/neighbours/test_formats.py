"""Files that ModelOpt and compressed-tensors write are read as they decode them, and they decode what is exported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as modelopt
import pytest
import safetensors.torch
import torch
import transformers
from compressed_tensors import compressors, quantization
from modelopt.torch.export import export_hf_checkpoint
from torch import Tensor, nn

import narrowcast as nc

CONFIGURATION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 72,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}
ZEROS = "model.layers.0.mlp.down_proj.weight"


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGURATION)).bfloat16()


@pytest.mark.parametrize(
    ("name", "algorithm", "error"),
    [
        ("NVFP4_DEFAULT_CFG", "NVFP4", 0.2),
        ("W4A16_NVFP4_CFG", "W4A16_NVFP4", 0.2),
        ("MXFP4_DEFAULT_CFG", "mxfp4", 0.2),
        ("W4A8_MXFP4_FP8_CFG", "W4A8_MXFP4_FP8", 0.2),
        ("FP8_DEFAULT_CFG", "FP8", 0.04),
        ("MXFP8_DEFAULT_CFG", "MXFP8", 0.04),
    ],
)
def test_a_checkpoint_of_modelopt(name: str, algorithm: str, error: float, tmp_path: Path) -> None:
    """With a weight of zeros, whose codes or scales ModelOpt writes as NaN."""
    model = llama()
    with torch.no_grad():
        model.get_parameter(ZEROS).zero_()
    weights = {key: value.clone() for key, value in model.state_dict().items() if "proj" in key}
    with torch.no_grad():
        made = modelopt.quantize(
            model, copy.deepcopy(getattr(modelopt, name)), lambda m: m(torch.arange(8)[None])
        )
        export_hf_checkpoint(made, export_dir=tmp_path)
    config = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert config["quantization"]["quant_algo"] == algorithm
    read = nc.load_quantized(llama(), tmp_path)
    for key, value in weights.items():
        values = read.get_parameter(key).dequantize().float()
        assert (values - value.float()).norm() <= error * value.float().norm(), key
    assert read(torch.arange(8)[None]).logits.isfinite().all()


def decompressed(tensors: dict[str, Tensor], scheme: Any, module: str) -> Tensor:
    own = {
        key.removeprefix(f"{module}."): one for key, one in tensors.items() if key.startswith(f"{module}.")
    }
    return compressors.BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp6", "mxfp4", "current"])
def test_compressed_tensors_decodes_an_export(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(160, 224), nn.Linear(224, 96)).bfloat16()
    plain = [layer.weight.detach().float().clone() for layer in model]
    nc.convert(model, name, blocks=True, small=True)
    format = "compressed-tensors" if name == "current" else name
    path = nc.export(model, tmp_path / "out", format=format).path
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    for index, value in enumerate(plain):
        found = decompressed(tensors, scheme, str(index)).float()
        assert (found - value).norm() <= (
            0.04 if name in ("mxfp8", "mxfp6", "current") else 0.2
        ) * value.norm()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4", "current"])
def test_what_compressed_tensors_compresses_again_is_read(name: str, tmp_path: Path) -> None:
    """Its own codes of the decoded values, in the layout that it writes."""
    model = nn.Sequential(nn.Linear(160, 224), nn.Linear(224, 96)).bfloat16()
    nc.convert(model, name, blocks=True, small=True)
    format = "compressed-tensors" if name == "current" else name
    path = nc.export(model, tmp_path / "out", format=format).path
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    values, written = {}, {key: one for key, one in tensors.items() if key.endswith("bias")}
    for module in "01":
        own = {key.removeprefix(f"{module}."): one for key, one in tensors.items() if key.startswith(module)}
        opened = compressor.decompress(dict(own), scheme)
        values[module] = opened["weight"].float()
        again = compressor.compress({**own, **opened}, scheme)
        written |= {
            f"{module}.{key}": one.detach().contiguous() for key, one in again.items() if "weight" in key
        }
    safetensors.torch.save_file(written, path / "model.safetensors")
    read = nc.load_quantized(nn.Sequential(nn.Linear(160, 224), nn.Linear(224, 96)).bfloat16(), path)
    for module, value in values.items():
        found = read.get_parameter(f"{module}.weight").dequantize().float()
        assert (found - value).norm() <= 2**-7 * value.norm()
