"""Served weights in compressed-tensors itself: what it decompresses, and the log-probabilities of its own forward."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recipes import DEVICE, QUANTIZED

import narrowcast as nc
from serving.test_export import decoded
from serving.test_forward_like import k3, log_probabilities, trained
from serving.test_weights import mixture

NEEDED = "needs compressed-tensors: pip install compressed-tensors"
compressors = pytest.importorskip("compressed_tensors.compressors", reason=NEEDED)
quantization = pytest.importorskip("compressed_tensors.quantization", reason=NEEDED)


def written(
    model: Any, path: Path, format: str = "compressed-tensors"
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The quantization_config and the tensors of an exported model."""
    nc.export(model, path, format=format)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return config, safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["delayed", "current", "channel", "block", "mxfp8", "nvfp4", "mxfp6", "mxfp4"]
)
def test_what_it_decompresses_is_what_training_read(name: str, tmp_path: Path) -> None:
    """Experts, a layer, rows and columns of odd numbers; 96 columns are whole blocks."""
    inner = {"block": 128, "mxfp8": 32, "nvfp4": 48, "mxfp6": 32, "mxfp4": 32}.get(name, 28)
    recipes = QUANTIZED | {
        "channel": QUANTIZED["current"],
        "mxfp6": nc.recipe.MXFP6BlockScaling(),
        "mxfp4": nc.recipe.MXFP4BlockScaling(),
    }
    model = mixture(recipes[name], inner)
    if name == "channel":
        nc.serving.forward_like(model, "vllm", format="fp8-channel")
    config, tensors = written(model, tmp_path / "out")
    scheme = quantization.QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    weights = sorted({key.split(".weight")[0] for key in tensors if ".weight" in key})
    assert len(weights) == 10
    for module in weights:
        own = {
            key.removeprefix(f"{module}."): value
            for key, value in tensors.items()
            if key.startswith(f"{module}.weight")
        }
        found = compressor.decompress(own, scheme)["weight"].float()
        expected = decoded(tensors, f"{module}.weight")
        torch.testing.assert_close(found, expected, rtol=2**-7 if name == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize("format", ["fp8-channel", "fp8-tensor", "fp8-static"])
def test_its_own_forward_gives_the_log_probabilities(format: str, tmp_path: Path) -> None:
    """It quantizes the inputs of each token itself; the product is PyTorch's on both sides."""
    model = trained("transformers" if format == "fp8-static" else "compressed-tensors", format)
    config, tensors = written(
        model, tmp_path / "out", "fp8-static" if format == "fp8-static" else "compressed-tensors"
    )
    other = nc.revert(copy.deepcopy(model))
    quantization.apply_quantization_config(
        other, quantization.QuantizationConfig.model_validate(config | {"quantization_status": "frozen"})
    )
    quantized = 0
    for name, module in other.named_modules():
        if f"{name}.weight_scale" in tensors:
            scale = tensors[f"{name}.weight_scale"].to(DEVICE)
            module.weight.data = tensors[f"{name}.weight"].to(DEVICE).float() * scale
            module.weight_scale.data = scale.reshape(module.weight_scale.shape)  # type: ignore[union-attr]
            assert module.quantization_status == quantization.QuantizationStatus.FROZEN
            if format == "fp8-static":
                module.input_scale.data = tensors[f"{name}.input_scale"].to(DEVICE)  # type: ignore[union-attr]
            quantized += 1
    own, found = log_probabilities(model), log_probabilities(other)
    assert quantized == 4
    if format != "fp8-static" and DEVICE == "cpu":
        assert torch.equal(own, found)
    # a static scale multiplies before the product there, after it here; a GPU adds products of codes in 14 bits
    assert k3(found, own) < (1e-12 if DEVICE == "cpu" else 1e-5)
