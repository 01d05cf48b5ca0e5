"""Checkpoints in four bits, kept as they are; checkpoints in bf16, quantized one weight after the other."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.convert.stored import DECODED, FOUR_BITS

from .test_export import decoded, stack, trained
from .test_load import unchanged

SIZES = (160, 224, 96)
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    },
    "compressed-mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
    },
    "compressed-mxfp8": {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}},
    },
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "modelopt-mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "modelopt-mxfp4": {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"},
}


def added(kind: str) -> str:
    """What the name of a weight's codes adds to the weight's."""
    return "_packed" if kind in ("compressed-nvfp4", "compressed-mxfp4") else ""


def written(
    kind: str, folder: Path, config_file: str = "config.json"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write a checkpoint as another library does; return its tensors and the values of its weights."""
    modelopt, name = kind.startswith("modelopt"), kind[-5:]
    state, values = stack(*SIZES).cpu().state_dict(), {}
    for key in [key for key in state if key.endswith("weight")]:
        copy: Any = DECODED[name].quantize(state.pop(key))
        rows, columns = copy.shape
        block = 16 if name == "nvfp4" else 32
        scale = copy._rowwise_scale_inv[:rows, : columns // block].contiguous()
        codes = copy._rowwise_data
        state[key + added(kind)] = codes.view(torch.float8_e4m3fn) if name == "mxfp8" else codes
        state[key + "_scale"] = scale.view(torch.float8_e4m3fn) if name == "nvfp4" else scale
        if name == "nvfp4":
            second = copy._amax_rowwise / 2688
            state[key + ("_scale_2" if modelopt else "_global_scale")] = (
                second.reshape(()) if modelopt else 1 / second
            )
        of_input = key.replace("weight", "input_scale" if modelopt else "input_global_scale")
        state[of_input] = torch.ones(1)
        values[key] = copy.dequantize()
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    config: Any = {"quantization_config": CONFIGS[kind]}
    if config_file != "config.json":  # as ModelOpt writes it
        (folder / "config.json").write_text("{}")
        config = {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": CONFIGS[kind]["quant_algo"]},
        }
    (folder / config_file).write_text(json.dumps(config))
    return state, values


@pytest.mark.parametrize("kind", CONFIGS)
def test_codes_and_scales_of_others_become_the_weights(kind: str, tmp_path: Path) -> None:
    name = kind[-5:]
    file = "hf_quant_config.json" if kind == "modelopt-nvfp4" else "config.json"
    state, values = written(kind, tmp_path, file)
    model = stack(*SIZES).to("meta")
    receipt = nc.receipt(nc.load_quantized(model, tmp_path))
    assert {one.stored_as for one in receipt.gemms} == {name}
    assert {one.recipe for one in receipt.gemms} == {
        "Float8CurrentScaling" if name == "nvfp4" else "Float8BlockScaling"
    }
    for key, value in values.items():
        weight: Any = model.get_parameter(key)
        assert torch.equal(weight._rowwise_data, state[key + added(kind)].view(torch.uint8))
        assert not weight.requires_grad
        if name == "nvfp4":  # the second scale came as a quotient
            torch.testing.assert_close(weight.dequantize(), value, rtol=2**-8, atol=0)
        else:
            assert torch.equal(weight.dequantize(), value)
    model.to(DEVICE)
    x = torch.randn(4, SIZES[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "mxfp4", "W4A8_MXFP4_FP8", "FP8"])
def test_an_all_zero_weight_of_modelopt_is_zeros(algorithm: str, tmp_path: Path) -> None:
    """It divides by the amax of the weight: tests/neighbours has files that it wrote."""
    written("modelopt-mxfp4" if "MXFP4" in algorithm.upper() else "modelopt-nvfp4", tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    nan = torch.tensor(float("nan")).to(torch.float8_e4m3fn)
    zero = torch.zeros(())
    if "NVFP4" in algorithm:
        state["0.weight"].fill_(0x77)
        state["0.weight_scale"] = nan.expand_as(state["0.weight_scale"]).contiguous()
        state["0.weight_scale_2"] = zero
    elif algorithm == "FP8":
        for key in [key for key in state if key.endswith("weight")]:
            rows, columns = state[key].shape
            state[key] = torch.ones(rows, 2 * columns).to(torch.float8_e4m3fn)
            state[key + "_scale"] = torch.ones(())
            del state[key + "_scale_2"]
        state["0.weight"] = nan.expand_as(state["0.weight"]).contiguous()
        state["0.weight_scale"] = zero
    else:
        state["0.weight"].fill_(0x88)  # negative zeros
        state["0.weight_scale"].zero_()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nc.load_quantized(stack(*SIZES).to("meta"), tmp_path)
    first, second = (model.get_parameter(f"{index}.weight").dequantize() for index in (0, 1))
    assert (first == 0).all() and (second != 0).any()
    if "NVFP4" in algorithm:  # NaN beside another scale is no weight of zeros
        state["0.weight_scale_2"] = torch.ones(())
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        unchanged(stack(*SIZES), tmp_path, "must be finite and positive", ValueError)


def test_what_this_library_wrote_is_read_as_it_is(tmp_path: Path) -> None:
    model = trained(QUANTIZED["nvfp4"], *SIZES)
    path = nc.export(model, tmp_path / "out", format="nvfp4").path
    again = nc.load_quantized(stack(*SIZES), path, "block")
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    for key in ("0.weight", "1.weight"):
        weight: Any = again.get_parameter(key)
        assert torch.equal(weight._rowwise_data.cpu(), tensors[f"{key}_packed"])
        torch.testing.assert_close(
            weight.dequantize().float().cpu(), decoded(tensors, key), rtol=2**-8, atol=0
        )
    assert nc.receipt(again).gemms[0].recipe == "Float8BlockScaling"


@pytest.mark.parametrize("kind", ["compressed-mxfp4", "compressed-mxfp8"])
def test_a_scale_of_e8m0_that_is_nan_is_refused(kind: str, tmp_path: Path) -> None:
    """compressed-tensors 0.20 decodes code 255 to infinity; it is NaN in the specification of OCP."""
    state, _ = written(kind, tmp_path)
    state["0.weight_scale"][3, 1] = 255
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    unchanged(stack(*SIZES), tmp_path, "scales of '0.weight' hold 255; they must be finite", ValueError)


@pytest.mark.parametrize(
    "change, match",
    [
        (("0.weight_scale", lambda x: x.fill_(float("nan"))), "hold nan; they must be finite"),
        (("0.weight_scale", lambda x: x[:, 1:]), r"the scales of '0.weight' are \(224, 9\)"),
        (("0.weight_scale", lambda x: x.float()), "are torch.float32; NVFP4 has float8_e4m3fn"),
        (("0.weight_packed", lambda x: x[1:]), r"\(223, 160\) in the checkpoint, \(224, 160\) in the model"),
        (("0.weight_global_scale", lambda x: -x), "must be finite and positive"),
        (("0.weight_global_scale", lambda x: x.repeat(2)), r"of \(2,\); one floating-point scale"),
        (
            ("0.weight_global_scale", lambda x: None),
            "in NVFP4 without its scale '0.weight_global_scale'; copy the",
        ),
        (("1.weight_packed", lambda x: None), "lacks"),
    ],
)
def test_damaged_files_change_nothing(change: Any, match: str, tmp_path: Path) -> None:
    state, _ = written("compressed-nvfp4", tmp_path)
    key, changed = change[0], change[1](state[change[0]].clone())
    state = {name: value for name, value in state.items() if name != key}
    state.update({} if changed is None else {key: changed.contiguous()})
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    error = RuntimeError if match == "lacks" else ValueError
    unchanged(stack(*SIZES), tmp_path, match, error)


class LiveBytes(TorchDispatchMode):
    """Notes the most bytes of tensors that were alive at once; not memory mapped from files, nor inside operators."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is not Tensor or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            place, size = storage._cdata, storage.nbytes()
            inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor) and not x.is_meta}
            if place in self._known or place in inputs:
                continue
            self._known.add(place)
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._freed, place, size)
        return out

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


@pytest.mark.parametrize("weights", FOUR_BITS)
def test_a_bf16_checkpoint_is_quantized_without_the_bf16_model_in_memory(
    weights: Any, tmp_path: Path
) -> None:
    layers, size = 24, 128
    plain = stack(*[size] * (layers + 1)).cpu().requires_grad_(False)
    state, named = plain.state_dict(), {}
    for index, key in enumerate(state):
        named[key] = f"model-{index % 3}.safetensors"
    for file in set(named.values()):
        part = {key: value for key, value in state.items() if named[key] == file}
        safetensors.torch.save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (tmp_path / "config.json").write_text("{}")
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(size, size, dtype=torch.bfloat16) for _ in range(layers)])
    model.requires_grad_(False)
    with LiveBytes() as memory:
        nc.load_quantized(model, tmp_path, weights=weights, skip="3")
    one, bf16 = size * size * 2, layers * size * size * 2
    assert memory.most < 0.3 * bf16 + 2 * one < 0.4 * bf16
    nc.convert(plain, model[0].recipe, weights=weights, skip="3")
    for ours, theirs in zip(model, plain):
        assert torch.equal(ours.weight.dequantize(), theirs.weight.dequantize())
        assert torch.equal(ours.bias, theirs.bias)
    records = nc.receipt(model).gemms
    assert [one.stored_as for one in records].count(weights) == layers - 1
    assert records[3].reason == "skip"


def test_what_cannot_be_asked_for_changes_nothing(tmp_path: Path) -> None:
    written("compressed-mxfp4", tmp_path / "codes")
    model = stack(*SIZES)
    with pytest.raises(ValueError, match="are for checkpoints in high precision"):
        nc.load_quantized(model, tmp_path / "codes", weights="mxfp4")
    plain = nc.export(trained(QUANTIZED["current"], *SIZES), tmp_path / "plain", format="bf16").path
    with pytest.raises(ValueError, match="it is in high precision; pass weights="):
        nc.load_quantized(model, plain)
    with pytest.raises(
        ValueError,
        match="weights is 'nf4'; use one of 'stored', 'nvfp4', 'mxfp4', 'mxfp6', 'mxfp8' or 'fp8-channel'",
    ):
        nc.load_quantized(model, plain, weights="nf4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finds no frozen weight"):
        nc.load_quantized(model, plain, weights="nvfp4")
    with pytest.raises(ValueError, match="quantizes them differently"):
        nc.load_quantized(model.requires_grad_(False), plain, QUANTIZED["mxfp8"], weights="stored")
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize("weights", FOUR_BITS)
def test_a_copy_in_four_bits_is_served_as_it_is(weights: Any, tmp_path: Path) -> None:
    model = nc.convert(stack(*SIZES).requires_grad_(False), QUANTIZED["block"], weights=weights)
    path = nc.export(model, tmp_path / "four", format="compressed-tensors").path
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    again = nc.load_quantized(stack(*SIZES), path, QUANTIZED["block"])
    for key in ("0.weight", "1.weight"):
        ours, theirs = again.get_parameter(key), model.get_parameter(key)
        assert torch.equal(ours._rowwise_data, theirs._rowwise_data)  # type: ignore[attr-defined]
        assert torch.equal(tensors[f"{key}_packed"], theirs._rowwise_data.cpu())  # type: ignore[attr-defined]
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["format"] == f"{weights}-pack-quantized"
    x = torch.randn(4, SIZES[0], device=DEVICE, dtype=torch.bfloat16)
    torch.testing.assert_close(again(x), model(x), rtol=2**-6, atol=2**-6)
    # in another format: what the GEMMs read
    path = nc.export(model, tmp_path / "eight", format="hf-fp8-block128").path
    assert torch.equal(nc.load_quantized(stack(*SIZES), path)(x), model(x))
    with pytest.raises(ValueError, match="mxfp8' holds the weights of MXFP8BlockScaling"):
        nc.export(model, tmp_path / "other", format="mxfp8")
