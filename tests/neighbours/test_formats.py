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
from modelopt.torch.quantization import qtensor
from serving.test_export import stack
from serving.test_layouts import SIZES, config_of, written
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8, mxfp4

import narrowcast as nc
from narrowcast.serving.read_formats import LAYOUTS, PublicLayout

CONFIGURATION = {
    "hidden_size": 128,
    "intermediate_size": 256,
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
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN", 0.04),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "fp8_pb_wo", 0.04),
        ("W4A8_NVFP4_FP8_CFG", "W4A8_NVFP4_FP8", 0.2),
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


OF_MODELOPT = [one for one in LAYOUTS if one.package == "nvidia-modelopt"]


@pytest.mark.parametrize("layout", OF_MODELOPT, ids=lambda one: one.config["quant_algo"])
def test_modelopt_decodes_alike(layout: PublicLayout, tmp_path: Path) -> None:
    """Any codes and scales, of sizes in whole tiles, which it decodes alone."""
    sizes = (256, 384, 128)
    state, _ = written(layout, tmp_path, sizes)
    read = nc.load_quantized(stack(*sizes, dtype=torch.float32), tmp_path)
    for key in ("0.weight", "1.weight"):
        codes, found = state[key], read.get_parameter(key).dequantize()
        how: dict[str, Any] = {"scale": state[f"{key}_scale"]}
        kind = qtensor.FP8QTensor
        if layout.read.weights == "nvfp4":
            kind, block = qtensor.NVFP4QTensor, 32 if layout.what == "blocks of 32" else 16
            how |= {"double_scale": state[f"{key}_scale_2"], "block_sizes": {-1: block}}
        elif layout.read.weights == "mxfp4":
            kind, how = qtensor.MXFP4QTensor, {**how, "block_sizes": {-1: 32}}
        elif layout.read.weights == "mxfp8":
            kind = qtensor.MXFP8QTensor
        elif layout.read.weights == "fp8-channel":
            how["scale"] = how["scale"][:, None]
        elif layout.config["quant_algo"] == "FP8_PB_WO":
            how = {"scale": how["scale"].squeeze((1, 3)), "block_sizes": {-1: 128, -2: 128}}
        value = kind(found.shape, torch.float32, codes).dequantize(torch.float32, **how)
        # NVFP4 multiplies three numbers, in an order of its own
        torch.testing.assert_close(found, value, rtol=2**-22 if "double_scale" in how else 0, atol=0)


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


def scheme_of(config: dict[str, Any]) -> Any:
    return quantization.QuantizationScheme.model_validate(config["config_groups"]["group_0"])


OWN = [one for one in LAYOUTS if one.package == "compressed-tensors"]


@pytest.mark.parametrize("layout", OWN, ids=lambda one: "-".join(str(value) for value in one.config.values()))
def test_files_of_compressed_tensors_decode_alike(layout: PublicLayout, tmp_path: Path) -> None:
    """Any codes and scales, and those that it writes of the decoded values."""
    state, _ = written(layout, tmp_path)
    config = config_of(layout)
    for group in config["config_groups"].values():
        group["weights"] |= {"type": "float", "symmetric": True}
        group["format"] = config["format"]
        if "strategy" not in group["weights"]:
            group["weights"]["strategy"] = "tensor_group" if "nvfp4" in config["format"] else "group"
            group["weights"]["scale_dtype"] = (
                "torch.float8_e4m3fn" if "nvfp4" in config["format"] else "torch.uint8"
            )
    scheme = scheme_of(config)
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    again = dict(state)
    for attempt in range(2):
        values = {}
        for module in "01":
            own = {
                key.removeprefix(f"{module}."): one
                for key, one in again.items()
                if key.startswith(f"{module}.weight")
            }
            opened = compressor.decompress(dict(own), scheme)
            values[module] = opened["weight"].double()
            made = compressor.compress({**own, **opened}, scheme)
            again |= {
                f"{module}.{key}": one.detach().contiguous() for key, one in made.items() if "weight" in key
            }
            again.pop(f"{module}.weight" if "weight_packed" in made else "", None)
        read = nc.load_quantized(stack(*SIZES, dtype=torch.float32), tmp_path)
        for module, value in values.items():
            found = read.get_parameter(f"{module}.weight").dequantize().double()
            # it decodes in the dtype of its scales
            torch.testing.assert_close(found, value, rtol=2**-7, atol=0)
        if attempt == 0:
            safetensors.torch.save_file(again, tmp_path / "model.safetensors")


OF_TRANSFORMERS = [one for one in LAYOUTS if one.config["quant_method"] in ("fp8", "mxfp4") and one.compared]


@pytest.mark.parametrize(
    "layout", OF_TRANSFORMERS, ids=lambda one: "-".join(map(str, one.config.values())) + one.read.scales[0]
)
def test_transformers_decodes_alike(layout: PublicLayout, tmp_path: Path) -> None:
    if layout.read.stacked:
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randint(256, (3, 192, 2, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, (3, 192, 2), generator=generator, dtype=torch.uint8)
        found = layout.read.decode("gate_up_proj", {"_blocks": blocks, "_scales": scales}, torch.bfloat16)
        assert torch.equal(found, mxfp4.convert_moe_packed_tensors(blocks, scales))
        return
    sizes = (256, 384, 128)  # Transformers decodes whole tiles alone
    state, _ = written(layout, tmp_path, sizes)
    read = nc.load_quantized(stack(*sizes, dtype=torch.float32), tmp_path)
    for key in ("0.weight", "1.weight"):
        codes, scales = (state[layout.read.name_of(key, suffix)] for suffix in ("", *layout.read.scales))
        decode = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
        assert torch.equal(read.get_parameter(key).dequantize(), decode(codes, scales, torch.float32)), key
