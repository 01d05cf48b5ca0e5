"""Checkpoints for servers: the bits that the training GEMMs read, whole or not there, and read back as they are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recipes import DEVICE, EMULATE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc

FORMATS = {
    "hf-fp8-block128": "block",
    "compressed-tensors": "current",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
# what each recipe writes as compressed-tensors
STRATEGIES = {
    "delayed": ("float-quantized", "tensor"),
    "current": ("float-quantized", "tensor"),
    "block": ("float-quantized", "block"),
    "mxfp8": ("mxfp8-quantized", "group"),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group"),
}


def stack(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))).to(DEVICE, dtype)


def trained(recipe: Any, *sizes: int) -> nn.Sequential:
    """A converted stack after a step, so that delayed scaling has scales."""
    model = stack(*sizes)
    nc.convert(model, recipe)
    x = torch.randn(32, sizes[0], generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    model(x).float().square().sum().backward()
    return nc.renew_delayed_scaling(model).eval()


def multiplied(layer: Any, recipe: Any) -> Tensor:
    """The values of the weight that a forward multiplies by: rows of the identity, which every format holds exactly."""
    features = layer.in_features
    with torch.no_grad(), nc.autocast(recipe=recipe):
        for slots in layer.delayed_slots():
            slots.scale.fill_(1.0)  # of the input
        bias, layer.bias = layer.bias, None
        out = layer(torch.eye(features, dtype=torch.bfloat16, device=DEVICE))
        layer.bias = bias
    return out.t()


def decoded(tensors: dict[str, Tensor], key: str) -> Tensor:
    """What a server makes of a weight, written from the formats' own descriptions."""
    if f"{key}_packed" in tensors:
        packed = tensors[f"{key}_packed"]
        if packed.shape[1] == 24 * tensors[f"{key}_scale"].shape[1]:  # MXFP6, four codes in three bytes
            return six_bits(packed) * torch.exp2(tensors[f"{key}_scale"].float() - 127).repeat_interleave(
                32, 1
            )
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
        if f"{key}_global_scale" not in tensors:  # MXFP4
            return values[codes] * torch.exp2(tensors[f"{key}_scale"].float() - 127).repeat_interleave(32, 1)
        scale = tensors[f"{key}_scale"].float() / tensors[f"{key}_global_scale"]
        return values[codes] * scale.repeat_interleave(16, 1)
    codes = tensors[key].float()
    scale = tensors[f"{key}_scale_inv" if f"{key}_scale_inv" in tensors else f"{key}_scale"]
    if scale.dtype == torch.uint8:
        return codes * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    if scale.dim() == 2 and len(scale) < len(codes):
        tiles = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)
        scale = tiles[:, : codes.shape[1]]
    return codes * scale


def six_bits(packed: torch.Tensor) -> torch.Tensor:
    """Values of E2M3."""
    a, b, c = packed.long().unflatten(1, (-1, 3)).unbind(-1)
    codes = torch.stack([a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2], -1).flatten(1)
    exponent, mantissa = codes >> 3 & 3, (codes & 7).float()
    size = torch.where(exponent == 0, mantissa / 8, (1 + mantissa / 8) * torch.exp2(exponent - 1.0))
    return torch.where(codes >> 5 == 1, -size, size)


@pytest.mark.parametrize("amax", [7e-36, 1e-38, 1e-44, 0.0])
def test_nvfp4_writes_zeros_where_the_second_scale_has_no_reciprocal(amax: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(amax)
        model[1].weight.fill_(8e-36)
    nc.convert(model, nc.recipe.NVFP4BlockScaling(emulate=EMULATE), blocks=True, small=True)
    path = nc.export(model, tmp_path / "out", format="nvfp4").path
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    assert all(tensors[f"{one}.weight_global_scale"].isfinite().all() for one in "01")
    assert not tensors["0.weight_packed"].any()
    plain = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False))
    again = nc.load_quantized(plain, path)
    assert not again[0].weight.dequantize().any()
    torch.testing.assert_close(again[1].weight.dequantize(), torch.full((32, 48), 8e-36), rtol=0.1, atol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_values_on_disk_are_those_that_the_forward_multiplies(name: str, tmp_path: Path) -> None:
    recipe = QUANTIZED[name]
    model = trained(recipe, 160, 224, 96)
    want = {f"{i}.weight": multiplied(layer, recipe).float().cpu() for i, layer in enumerate(model)}
    result = nc.export(model, tmp_path / "out", format="compressed-tensors")
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    for key, value in want.items():
        torch.testing.assert_close(decoded(tensors, key).bfloat16().float(), value, rtol=2**-8, atol=0)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["weights"]["strategy"]) == STRATEGIES[name]
    assert config["ignore"] == [] and group["targets"] == ["Linear"]
    assert result.bytes == sum(t.numel() * t.element_size() for t in tensors.values()) < result.bytes_before
    assert not [key for key in tensors if "amax" in key or key.endswith(".scale")]


@pytest.mark.parametrize(("format", "name"), FORMATS.items())
def test_every_format_writes_the_codes_of_the_quantizer(format: str, name: str, tmp_path: Path) -> None:
    recipe = QUANTIZED[name]
    model = trained(recipe, 256, 384)
    nc.export(model, tmp_path / "out", format=format)
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    quantizer = nc.recipe.linear_plan(recipe, "", False, False, module_type="linear").kept_weight.quantizer
    quantized: Any = quantizer.with_usage(rowwise=True, columnwise=False).quantize(model[0].weight.detach())
    codes = quantized._data if name == "current" else quantized._rowwise_data
    written = tensors["0.weight_packed" if name == "nvfp4" else "0.weight"]
    assert torch.equal(written.view(torch.uint8), codes.cpu())


def test_fine_grained_names_what_stays(tmp_path: Path) -> None:
    model = stack(160, 224, 96, 48)
    nc.convert(model, QUANTIZED["block"], skip="2")
    result = nc.export(model, tmp_path / "out", format="hf-fp8-block128")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["2"] and config["weight_block_size"] == [128, 128]
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert tensors["0.weight_scale_inv"].shape == (2, 2) and tensors["0.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors["2.weight"], model[2].weight.detach().cpu())
    assert "2 of 3 weights quantized" in str(result)
    assert "in high precision: '2.weight': its layer has no recipe" in str(result)


def test_several_recipes_are_several_groups(tmp_path: Path) -> None:
    model = stack(128, 128, 128)
    nc.convert(model, {"0": QUANTIZED["current"], "1": QUANTIZED["mxfp8"]})
    nc.export(model, tmp_path / "out", format="compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    groups = config["config_groups"].values()
    assert [(group["targets"], group["format"]) for group in groups] == [
        (["0"], "float-quantized"),
        (["1"], "mxfp8-quantized"),
    ]


def test_another_recipe_can_be_given(tmp_path: Path) -> None:
    model = trained(QUANTIZED["current"], 128, 128)
    nc.export(model, tmp_path / "out", format="mxfp8", recipe=QUANTIZED["mxfp8"])
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert tensors["0.weight_scale"].dtype == torch.uint8 and tensors["0.weight_scale"].shape == (128, 4)


def test_bf16_has_no_quantization(tmp_path: Path) -> None:
    model = stack(32, 32, dtype=torch.float32)
    nc.convert(model, QUANTIZED["current"])
    nc.export(model, tmp_path / "out", format="bf16")
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(tensors["0.weight"], model[0].weight.detach().bfloat16().cpu())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_tied_weights_stay_and_layers_of_the_library_go(tmp_path: Path) -> None:
    model = nn.Sequential(
        nc.LayerNormLinear(64, 64, recipe=QUANTIZED["current"], params_dtype=torch.bfloat16, device=DEVICE),
        nc.LayerNormMLP(64, 96, recipe=QUANTIZED["current"], params_dtype=torch.bfloat16, device=DEVICE),
    )
    result = nc.export(model, tmp_path / "out", format="compressed-tensors")
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert {one.name for one in result.weights if not one.reason} == {
        "0.weight",
        "1.fc1_weight",
        "1.fc2_weight",
    }
    assert tensors["1.fc1_weight_scale"].shape == (1,)
    tied = stack(64, 64, 64)
    tied[1].weight = tied[0].weight
    nc.convert(tied, QUANTIZED["current"])
    with pytest.raises(ValueError, match="no layer of the model has a weight to quantize"):
        nc.export(tied, tmp_path / "tied", format="compressed-tensors")


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    model = trained(QUANTIZED["current"], 100, 64)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "format is 'gguf'", {"format": "gguf"}),
        (
            ValueError,
            "^'.*' has the recipe .* holds the weights of Float8BlockScaling",
            {"format": "hf-fp8-block128"},
        ),
        (ValueError, "multiples of 32 columns", {"format": "mxfp8", "recipe": QUANTIZED["mxfp8"]}),
        (ValueError, r"^dtype is torch.int8; .* torch.bfloat16", {"format": "bf16", "dtype": torch.int8}),
        (ValueError, "^dtype is torch.bool;", {"format": "compressed-tensors", "dtype": torch.bool}),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            nc.export(model, tmp_path / "out", **arguments)
    with pytest.raises(ValueError, match="meta device"):
        nc.export(copy.deepcopy(model).to("meta"), tmp_path / "out", format="bf16")
    unseen = nc.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
    with pytest.raises(
        ValueError, match="the layer of '0.weight' has seen no input under delayed scaling yet"
    ):
        nc.export(unseen, tmp_path / "out", format="fp8-static")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        nc.export(model, tmp_path / "full", format="bf16")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        nc.export(stack(32, 32), tmp_path / "out", format="bf16")
    assert not list(tmp_path.iterdir())


class Tied(nn.Module):
    """Tied embeddings, and a buffer that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("part", self.table[2:4])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
def test_what_is_tied_is_written_once(format: str, dtype: Any, tmp_path: Path) -> None:
    model = Tied()
    nc.convert(model, QUANTIZED["current"], only="body")
    written = nc.export(model, tmp_path / "out", format=format, dtype=dtype)
    file = written.path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    assert "head.weight" not in tensors
    assert torch.equal(
        tensors["embed.weight"].float(), model.embed.weight.to(tensors["embed.weight"].dtype).float()
    )
    assert tensors["part"].tolist() == [2.0, 3.0] and tensors["table"].tolist() == list(range(8))
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert written.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if format != "bf16":
        again = Tied()
        nc.load_quantized(again, written.path)
        assert again.head.weight is again.embed.weight
        assert torch.equal(again.embed.weight.to(tensors["embed.weight"].dtype), tensors["embed.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "recipe, format",
    [
        ("block", "hf-fp8-block128"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("current", "compressed-tensors"),
        (None, "bf16"),
    ],
)
def test_a_weight_that_is_not_finite_is_not_exported(
    recipe: str | None, format: str, value: float, tmp_path: Path
) -> None:
    """Formats clamp infinity, or a server answers with it."""
    model: Any = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    if recipe is not None:
        nc.convert(model, recipe)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with torch.no_grad():
        model[1].weight[3, 5] = value
    with pytest.raises(ValueError, match="'1.weight' holds NaN or infinity"):
        nc.export(model, tmp_path / "out", format=format)
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        model[1].weight[3, 5] = 0.0
    nc.export(model, tmp_path / "out", format=format)
