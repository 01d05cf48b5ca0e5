"""What ``nc.export`` writes, ``nc.load_quantized`` reads: the codes and scales of layers, the values of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from convert.models import Llama4TextExperts
from recipes import DEVICE, EMULATE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert.stored import DECODED
from narrowcast.serving.formats import CHECKPOINT_FORMATS
from narrowcast.tensors import GroupedTensor

from .test_export import decoded, stack
from .test_weights import Experts

RECIPES = {
    **QUANTIZED,
    "rowwise": nc.recipe.Float8RowwiseScaling(emulate=EMULATE),
    "mxfp6": nc.recipe.MXFP6BlockScaling(),
    "mxfp4": nc.recipe.MXFP4BlockScaling(),
}
KINDS = {
    "hf-fp8-block128": ["block"],
    "compressed-tensors": ["delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", "mxfp6", "mxfp4"],
    "mxfp8": ["mxfp8"],
    "nvfp4": ["nvfp4"],
    "mxfp6": ["mxfp6"],
    "mxfp4": ["mxfp4"],
    "fp8-static": ["delayed"],
}
PAIRS = [(format, name) for format, names in KINDS.items() for name in names]


def test_every_format_is_tried() -> None:
    assert set(KINDS) == {name for name, kind in CHECKPOINT_FORMATS.items() if kind.weights}


def written(model: Any, recipe: Any, run: Any, path: Path, format: str) -> dict[str, Tensor]:
    """The tensors of an export of the model, converted here."""
    nc.convert(model, recipe, routers=True, small=True, blocks=True)
    if recipe.delayed():
        run(model).float().square().sum().backward()
        nc.renew_delayed_scaling(model)
    nc.export(model, path, format=format)
    return safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize(("format", "name"), PAIRS)
def test_layers_have_the_codes_and_scales_of_the_files(format: str, name: str, tmp_path: Path) -> None:
    x = torch.randn(32, 160, device=DEVICE, dtype=torch.bfloat16)
    tensors = written(stack(160, 224, 96), RECIPES[name], lambda model: model(x), tmp_path / "out", format)
    again = nc.load_quantized(stack(160, 224, 96), tmp_path / "out")
    assert all(one.stored for one in nc.receipt(again).gemms)
    for key in ("0.weight", "1.weight"):
        values = again.get_parameter(key).dequantize().cpu()
        torch.testing.assert_close(
            values.float(), decoded(tensors, key), rtol=2**-8 if values.dtype == torch.bfloat16 else 0, atol=0
        )
    nc.export(again, tmp_path / "again", format="compressed-tensors" if format == "fp8-static" else format)
    same = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    for key, value in tensors.items():
        if not key.endswith("input_scale"):
            assert same[key].dtype == value.dtype, key
            assert torch.equal(same[key].view(torch.uint8), value.view(torch.uint8)), key


class Mixture(nn.Module):
    """Stacked experts beside a layer."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.proj = experts, nn.Linear(96, 96)


def mixture(kind: str) -> Any:
    experts = Experts(3, 96, 128) if kind == "qwen" else Llama4TextExperts(3, 96, 128)
    return Mixture(experts).to(DEVICE, torch.bfloat16)


def run(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 96, generator=generator).to(DEVICE, torch.bfloat16)
    if isinstance(model.experts, Llama4TextExperts):
        return model.experts(x) + model.proj(x)
    index = torch.arange(9, device=DEVICE)[:, None] % 3
    return model.experts(x, index, torch.ones(9, 1, device=DEVICE, dtype=torch.bfloat16)) + model.proj(x)


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["qwen", "llama4"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(pair))
@pytest.mark.parametrize("meta", [False, True])
def test_experts_one_by_one_have_the_values_of_the_files(
    kind: str, pair: tuple[str, str], meta: bool, tmp_path: Path
) -> None:
    format, name = pair
    torch.manual_seed(0)
    tensors = written(mixture(kind), RECIPES[name], run, tmp_path / "out", format)
    assert "experts.gate_up_proj" not in tensors
    torch.manual_seed(1)
    again = mixture(kind)
    again = nc.load_quantized(again.to("meta") if meta else again, tmp_path / "out").to(DEVICE)
    assert torch.equal(again.proj.bias.cpu(), tensors["proj.bias"])
    for stacked, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
        held = again.get_parameter(f"experts.{stacked}")
        assert not held.requires_grad and not held.is_meta
        assert isinstance(held, GroupedTensor)
        held = held.dequantize()
        for i in range(3):
            values = torch.cat([decoded(tensors, f"experts.{i}.{part}.weight") for part in parts])
            found = held[i].T if kind == "llama4" else held[i]
            assert torch.equal(found.cpu(), values.bfloat16())
    converted = {one.name: one for one in nc.receipt(again).gemms}
    assert all(one.decision == "converted" for one in converted.values())
    assert run(again).isfinite().all()
    nc.export(again, tmp_path / "again", format="compressed-tensors" if format == "fp8-static" else format)
    same = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    for key, value in tensors.items():
        if not key.endswith("input_scale"):
            assert torch.equal(same[key].view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.parametrize("kind", ["qwen", "llama4"])
def test_experts_in_high_precision_load_beside_weights_that_are_quantized(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixture(kind)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    files = {key: value for key, value in tensors.items() if not key.startswith("experts")}
    for name, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
        stacked = tensors[f"experts.{name}"]
        stacked = stacked.transpose(1, 2) if kind == "llama4" else stacked
        for i in range(3):
            for part, rows in zip(parts, stacked[i].chunk(len(parts))):
                files[f"experts.{i}.{part}.weight"] = rows.cpu().contiguous()
    safetensors.torch.save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    torch.manual_seed(1)
    again = nc.load_quantized(mixture(kind).requires_grad_(False), tmp_path, weights="mxfp8")
    for name in ("gate_up_proj", "down_proj"):
        held = again.get_parameter(f"experts.{name}")
        values = tensors[f"experts.{name}"]
        quantizer, turns = DECODED["mxfp8"], kind == "llama4"
        values = values.transpose(1, 2) if turns else values
        values = torch.stack([quantizer.quantize(one.contiguous()).dequantize() for one in values])
        assert torch.equal(held.dequantize(), values.transpose(1, 2) if turns else values)
    stored = {one.name: one.stored_as for one in nc.receipt(again).gemms}
    assert stored["proj"] == stored["experts.down_proj"] == "mxfp8"


def test_what_lacks_one_expert_changes_nothing(tmp_path: Path) -> None:
    model = mixture("qwen")
    tensors = written(mixture("qwen"), RECIPES["current"], run, tmp_path, "compressed-tensors")
    del tensors["experts.1.up_proj.weight"], tensors["experts.1.up_proj.weight_scale"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="lacks 'experts.1.up_proj.weight' of 'experts.gate_up_proj'"):
        nc.load_quantized(model, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_layers_of_several_formats_load_together(tmp_path: Path) -> None:
    """Each group of a mixed checkpoint as it is: per tensor, per tile, per row, and in four bits."""
    sizes = (128, 256, 128, 64, 128)
    names = ["current", "block", "rowwise", "nvfp4"]
    model = stack(*sizes)
    nc.convert(model, {str(i): RECIPES[name] for i, name in enumerate(names)}, small=True, blocks=True)
    nc.export(model, tmp_path / "mixed", format="compressed-tensors")
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 4
    again = nc.load_quantized(stack(*sizes), tmp_path / "mixed")
    assert [one.recipe for one in nc.receipt(again).gemms] == [
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "Float8RowwiseScaling",
        "Float8CurrentScaling",
    ]
    nc.export(again, tmp_path / "again", format="compressed-tensors")
    first, second = (
        safetensors.torch.load_file(tmp_path / folder / "model.safetensors") for folder in ("mixed", "again")
    )
    assert set(first) == set(second)
    for key, value in first.items():
        assert torch.equal(second[key].view(torch.uint8), value.view(torch.uint8)), key
    with pytest.raises(ValueError, match="recipe is block, and the checkpoint's weights are those of Float8"):
        nc.load_quantized(stack(*sizes), tmp_path / "mixed", "block")
