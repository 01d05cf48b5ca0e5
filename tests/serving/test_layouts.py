"""Every public layout is read: small files by its description, decoded by a formula that is written here."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from convert.models import Llama4TextExperts
from recipes import DEVICE
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert.stored import stored_as
from narrowcast.serving.read_formats import LAYOUTS, PublicLayout, layouts_of, parts_of, read_formats
from narrowcast.tensors import GroupedTensor

from .test_export import six_bits, stack
from .test_load import unchanged
from .test_weights import Experts

SIZES = (256, 384, 160)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
IDS = [
    f"{one.package}-{'-'.join(str(value) for value in one.config.values())}-{one.read.scales[0]}"
    for one in LAYOUTS
]
PLAIN = [one for one in LAYOUTS if not one.read.stacked]


def drawn(
    layout: PublicLayout, rows: int, columns: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Codes and scales of a weight by what their names add, and the values that they stand for, fp64."""
    read, name = layout.read, layout.read.weights
    if read.dtype == torch.float8_e4m3fn:
        codes = torch.randn(rows, columns, generator=generator).mul_(60).to(torch.float8_e4m3fn)
        values = codes.double()
    else:
        bits = 6 if name == "mxfp6" else 4
        codes = torch.randint(256, (rows, columns * bits // 8), generator=generator, dtype=torch.uint8)
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        values = (six_bits(codes) if bits == 6 else E2M1[pairs]).double()
        codes = codes.view(read.dtype)
    if name.startswith("mx"):
        scale = torch.randint(110, 130, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        values *= torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
        return {read.codes: codes, read.scales[0]: scale}, values
    if name == "nvfp4":
        block = 32 if layout.what == "blocks of 32" else 16
        scale = torch.rand(rows, columns // block, generator=generator).mul_(400).to(torch.float8_e4m3fn)
        second = torch.rand(1, generator=generator) + 0.25
        reciprocal = read.scales[1] == "_global_scale"
        one = 1 / second.double() if reciprocal else second.double()
        values *= scale.double().repeat_interleave(block, 1) * one
        if layout.package == "nvidia-modelopt":
            second = second.reshape(())
        return {read.codes: codes, read.scales[0]: scale, read.scales[1]: second}, values
    tiles = read.layout.scale_group == (128, 128)
    sizes = (-(-rows // 128), -(-columns // 128)) if tiles else (rows,) if name == "fp8-channel" else ()
    scale = torch.rand(sizes, generator=generator) / 64 + 2**-10
    if tiles:
        whole = scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        whole = scale.double().reshape(-1, 1)
    if name == "fp8-channel" and layout.package != "nvidia-modelopt":
        scale = scale[:, None]
    if tiles and layout.package == "nvidia-modelopt":
        scale = scale[:, None, :, None]
    return {read.codes: codes, read.scales[0]: scale}, values * whole


def config_of(layout: PublicLayout) -> dict[str, Any]:
    config = dict(layout.config)
    if config["quant_method"] != "compressed-tensors":
        return config
    method, format = config.pop("quant_method"), config.pop("format")
    groups = {"group_0": {"targets": ["Linear"], "weights": config, "input_activations": None}}
    return {"quant_method": method, "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def written(
    layout: PublicLayout, folder: Path, sizes: tuple[int, ...] = SIZES
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint of this layout; return its tensors and the values of its weights."""
    generator, values = torch.Generator().manual_seed(0), {}
    state: dict[str, Tensor] = {
        f"{i}.bias": torch.zeros(size, dtype=torch.bfloat16) for i, size in enumerate(sizes[1:])
    }
    for i, (columns, rows) in enumerate(zip(sizes, sizes[1:])):
        key = f"{i}.weight"
        tensors, values[key] = drawn(layout, rows, columns, generator)
        state |= {layout.read.name_of(key, suffix): one.contiguous() for suffix, one in tensors.items()}
        state |= {f"{i}.{name}": torch.ones(()) for name in layout.read.inputs}
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config_of(layout)}))
    return state, values


@pytest.mark.parametrize("layout", PLAIN, ids=[name for name, one in zip(IDS, LAYOUTS) if one in PLAIN])
def test_codes_stay_and_decode_to_the_values_of_the_formula(layout: PublicLayout, tmp_path: Path) -> None:
    state, values = written(layout, tmp_path)
    model = nc.load_quantized(stack(*SIZES, dtype=torch.float32).to("meta"), tmp_path).to(DEVICE)
    assert {stored_as(layer) for layer in model} == {layout.read.weights}
    for key, value in values.items():
        weight: Any = model.get_parameter(key)
        codes = weight.get_data_tensors()[0].cpu()
        assert torch.equal(codes, state[layout.read.name_of(key, layout.read.codes)].view(torch.uint8))
        found = weight.dequantize().double().cpu()
        # NVFP4 multiplies three numbers in fp32, and others two
        torch.testing.assert_close(
            found, value, rtol=2**-22 if layout.read.weights == "nvfp4" else 2**-24, atol=0
        )
        assert not weight.requires_grad
    x = torch.randn(4, SIZES[0], dtype=torch.float32, device=DEVICE, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("layout", PLAIN, ids=[name for name, one in zip(IDS, LAYOUTS) if one in PLAIN])
def test_a_missing_scale_and_one_of_another_size_are_named(layout: PublicLayout, tmp_path: Path) -> None:
    state, _ = written(layout, tmp_path)
    for name in (layout.read.name_of("1.weight", suffix) for suffix in layout.read.scales):
        safetensors.torch.save_file(
            {k: v for k, v in state.items() if k != name}, tmp_path / "model.safetensors"
        )
        told = "without its scale" if len(layouts_of(parts_of(config_of(layout))[0])) == 1 else "scale"
        unchanged(stack(*SIZES), tmp_path, told)
        other = {**state, name: torch.ones(7, 3).to(state[name].dtype)}
        safetensors.torch.save_file(other, tmp_path / "model.safetensors")
        unchanged(stack(*SIZES), tmp_path, "the scales of '1.weight' are|one floating-point scale|has blocks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("suffix", ["_scale_inv", ".scale", ".qscale_weight"])
def test_tiles_have_scales_in_fp32_bf16_and_e8m0_under_each_name(
    suffix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    (layout,) = [
        one for one in LAYOUTS if one.read.scales == (suffix,) and one.read.layout.scale_group == (128, 128)
    ]
    state, _ = written(layout, tmp_path)
    expected = {}
    for i in range(2):
        name = layout.read.name_of(f"{i}.weight", suffix)
        power = (
            torch.randint(-8, 3, state[name].shape, generator=torch.Generator().manual_seed(i)).float().exp2()
        )
        e8m0 = power.to(torch.float8_e8m0fnu)
        state[name] = e8m0.view(torch.uint8) if dtype == torch.uint8 else power.to(dtype)
        rows, columns = state[f"{i}.weight"].shape
        whole = power.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        expected[f"{i}.weight"] = state[f"{i}.weight"].float() * whole
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = nc.load_quantized(stack(*SIZES), tmp_path)
    for key, value in expected.items():
        assert torch.equal(model.get_parameter(key).dequantize().float().cpu(), value)
    if dtype.itemsize == 1:
        state[layout.read.name_of("0.weight", suffix)].view(torch.uint8)[0, 0] = 255
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        unchanged(stack(*SIZES), tmp_path, "must be finite and positive")


def test_ignored_modules_and_shards(tmp_path: Path) -> None:
    """One layer in high precision; files by an index."""
    (layout,) = [one for one in LAYOUTS if one.config.get("strategy") == "channel"]
    state, values = written(layout, tmp_path)
    plain = stack(*SIZES).state_dict()["1.weight"].cpu()
    state = {key: value for key, value in state.items() if not key.startswith("1.weight")} | {
        "1.weight": plain
    }
    (tmp_path / "model.safetensors").unlink()
    files = {key: f"model-{i % 3}.safetensors" for i, key in enumerate(state)}
    for file in set(files.values()):
        safetensors.torch.save_file({k: v for k, v in state.items() if files[k] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = nc.load_quantized(stack(*SIZES), tmp_path)
    assert torch.equal(model[1].weight.cpu(), plain) and type(model[1]) is nn.Linear
    torch.testing.assert_close(
        model[0].weight.dequantize().double().cpu(), values["0.weight"], rtol=2**-8, atol=0
    )


def test_what_a_model_of_transformers_leaves_out_is_not_read(tmp_path: Path) -> None:
    """DeepSeek's checkpoints have a layer more, which predicts further tokens, and its model says that it leaves it."""
    (layout,) = [
        one for one in LAYOUTS if one.read.scales == ("_scale_inv",) and one.config.get("weight_block_size")
    ][:1]
    state, _ = written(layout, tmp_path)
    more = {key.replace("1.", "2.", 1): value.clone() for key, value in state.items() if key.startswith("1.")}
    safetensors.torch.save_file({**state, **more}, tmp_path / "model.safetensors")
    unchanged(stack(*SIZES), tmp_path, "the model has no module '2'")
    model: Any = stack(*SIZES)
    model._keys_to_ignore_on_load_unexpected = {r"^2\..*", r"^0\..*"}  # what the model has is read
    nc.load_quantized(model, tmp_path)
    assert all(stored_as(layer) for layer in model)


def test_layers_of_modelopt_may_differ(tmp_path: Path) -> None:
    first, second = (
        next(one for one in LAYOUTS if one.config.get("quant_algo") == name) for name in ("FP8", "NVFP4")
    )
    state, values = written(first, tmp_path)
    other, others = written(second, tmp_path)
    state = {k: v for k, v in state.items() if k.startswith("0.")} | {
        k: v for k, v in other.items() if k[0] == "1"
    }
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    layers = {"0": {"quant_algo": "FP8"}, "1": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = nc.load_quantized(stack(*SIZES), tmp_path)
    assert [stored_as(layer) for layer in model] == ["stored", "nvfp4"]
    for key, value in {"0.weight": values["0.weight"], "1.weight": others["1.weight"]}.items():
        torch.testing.assert_close(
            model.get_parameter(key).dequantize().double().cpu(), value, rtol=2**-7, atol=0
        )


@pytest.mark.parametrize("algorithm", ["FP8_PER_CHANNEL_PER_TOKEN"])
def test_rows_of_zeros_of_modelopt_are_zeros(algorithm: str, tmp_path: Path) -> None:
    """It divides by the amax of the row."""
    (layout,) = [one for one in LAYOUTS if one.config.get("quant_algo") == algorithm]
    state, values = written(layout, tmp_path)
    state["0.weight"].view(torch.uint8)[3] = 0x7F
    state["0.weight_scale"][3] = 0
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    found = nc.load_quantized(stack(*SIZES), tmp_path)[0].weight.dequantize().double().cpu()
    values["0.weight"][3] = 0
    torch.testing.assert_close(found, values["0.weight"], rtol=2**-8, atol=0)
    state["0.weight"].view(torch.uint8)[3] = 8
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    unchanged(stack(*SIZES), tmp_path, "must be finite and positive")


@pytest.mark.parametrize("name", ["pre_quant_scale", "svdquant_lora_a", "weight_zero_point"])
def test_what_changes_a_layer_beside_its_weight_is_refused(name: str, tmp_path: Path) -> None:
    (layout,) = [one for one in LAYOUTS if one.config.get("quant_algo") == "NVFP4"]
    state, _ = written(layout, tmp_path)
    safetensors.torch.save_file({**state, f"1.{name}": torch.ones(384)}, tmp_path / "model.safetensors")
    unchanged(stack(*SIZES), tmp_path, rf"has '1.{name}', which changes the input or the output of a layer")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"0": {"quant_algo": "INT4"}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
        },
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_layouts_are_refused_by_name(config: Any) -> None:
    with pytest.raises(ValueError, match=r"load_quantized reads FP8 \(a scale per") as raised:
        read_formats(config)
    assert len(str(raised.value)) <= 320


def test_experts_of_gpt_oss_are_kept_in_four_bits(tmp_path: Path) -> None:
    """OpenAI's layout: 16 bytes of each block of 32, the first code of two in the low bits, and a scale per block."""

    class Experts(nn.Module):
        has_gate, has_bias, is_transposed, has_post_expert_norm = True, True, True, False

        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 3
            for name, (columns, rows) in {"gate_up_proj": (64, 192), "down_proj": (96, 64)}.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(3, columns, rows)))
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(3, rows)))

        def _apply_gate(self, x: Tensor) -> Tensor:
            return x[..., ::2] * x[..., 1::2]

        def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            raise NotImplementedError

    generator, state, values = torch.Generator().manual_seed(0), {}, {}
    model = nn.ModuleDict({"experts": Experts()}).to(DEVICE, torch.bfloat16)
    for name, (rows, columns) in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
        blocks = torch.randint(256, (3, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, (3, rows, columns // 32), generator=generator, dtype=torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        value = E2M1[codes] * torch.exp2(scales.float() - 127)[..., None]
        values[name] = value.flatten(2).transpose(1, 2)
        state |= {f"experts.{name}_blocks": blocks, f"experts.{name}_scales": scales}
        state[f"experts.{name}_bias"] = torch.ones(3, rows, dtype=torch.bfloat16)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    nc.load_quantized(model, tmp_path)
    for name, value in values.items():
        held = model.get_parameter(f"experts.{name}")
        assert isinstance(held, GroupedTensor) and held.shape == value.shape
        assert torch.equal(held.float().cpu(), value) and not held.requires_grad
        assert model.get_parameter(f"experts.{name}_bias").eq(1).all()
    assert nc.receipt(model).gemms[0].stored_as == "mxfp4"


@pytest.mark.parametrize("kind", ["transformers", "fbgemm"])
def test_stacked_experts_in_fp8_are_kept(kind: str, tmp_path: Path) -> None:
    """Tiles of (E, N, K) beside ``gate_up_proj``, and a scale per column of (E, K, N), as FBGEMM has for Llama 4."""
    generator, state, values = torch.Generator().manual_seed(0), {}, {}
    experts = Experts(3, 96, 160) if kind == "transformers" else Llama4TextExperts(3, 96, 160)
    model = nn.ModuleDict({"experts": experts}).to(DEVICE, torch.bfloat16)
    for name, parameter in experts.named_parameters():
        codes = torch.randn(parameter.shape, generator=generator).mul_(60).to(torch.float8_e4m3fn)
        rows, columns = codes.shape[1:]
        if kind == "transformers":
            scale = torch.rand(3, -(-rows // 128), -(-columns // 128), generator=generator) / 64 + 2**-10
            whole = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :columns]
        else:
            scale = whole = torch.rand(3, 1, columns, generator=generator) / 64 + 2**-10
        suffix = "_scale_inv" if kind == "transformers" else "_scale"
        state |= {f"experts.{name}": codes, f"experts.{name}{suffix}": scale}
        values[name] = (codes.float() * whole).bfloat16()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    config = {"quant_method": "fbgemm_fp8"}
    if kind == "transformers":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    nc.load_quantized(model, tmp_path)
    for name, value in values.items():
        held = model.get_parameter(f"experts.{name}")
        assert isinstance(held, GroupedTensor)
        assert torch.equal(held.dequantize().cpu(), value) and not held.requires_grad


def test_the_page_has_the_records() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "layouts_table.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: python docs/layouts_table.py"
    assert all(script["PINNED"][one.package] for one in LAYOUTS if one.compared.startswith("its"))
