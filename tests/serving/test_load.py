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
    receipt = nc.receipt(nc.load_quantized(again, path))
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


def test_the_receipt_says_that_the_checkpoint_has_a_layer_in_high_precision(tmp_path: Path) -> None:
    model = nc.convert(stack(160, 224, 96), QUANTIZED["block"], only="0")
    path = nc.export(model, tmp_path / "out", format=KINDS["block"]).path
    kept = nc.receipt(nc.load_quantized(stack(160, 224, 96), path)).gemms[1]
    assert (kept.decision, kept.reason) == ("kept", "the checkpoint has it in high precision")


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
    with pytest.raises(RuntimeError, match="buffers 'table' are on the meta device"):
        nc.load_quantized(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    model = stack(160, 224, 96)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = nn.Sequential(*model, nn.Linear(96, 8, device=DEVICE, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="lacks '2.weight' and 1 more of the model; give the model"):
        nc.load_quantized(other, path)
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**tensors, "zzz": torch.ones(3)}, file)
    with pytest.raises(
        RuntimeError, match="^the model has no 'zzz', which the checkpoint has; give the model"
    ):
        nc.load_quantized(model, path)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ValueError, match="those of Float8CurrentScaling"):
        nc.load_quantized(model, path, QUANTIZED["block"])
    with pytest.raises(
        ValueError, match=r"\(224, 160\) in the checkpoint, .*; make the model with the sizes in"
    ):
        nc.load_quantized(stack(160, 200, 96), path)
    with pytest.raises(
        ValueError, match="the model has no module '0'; it has 'a'. Give the model that the checkpoint"
    ):
        nc.load_quantized(nn.ModuleDict({"a": nn.Linear(160, 224)}), path)
    for wrong in (nn.LayerNorm(160), nn.Sequential(nn.Linear(160, 224))):
        told = f"'0' of the model is {type(wrong).__name__}, not nn.Linear; the model has another architecture than"
        with pytest.raises(ValueError, match=told):
            nc.load_quantized(nn.Sequential(wrong), path)
    already = r"^'0' is a layer of narrowcast already, .* before it is converted or loaded, or call narrowcast\.revert"
    with pytest.raises(ValueError, match=already):
        nc.load_quantized(nc.convert(stack(160, 224, 96), QUANTIZED["current"]), path)
    config = path / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "group"
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="load_quantized reads FP8"):
        nc.load_quantized(model, path)
    config.unlink()
    with pytest.raises(FileNotFoundError):
        nc.load_quantized(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(layer) is nn.Linear for layer in model)


# -- files that are not what they should be ----------------------------------------------------------------------------


def edit_config(path: Path, **changes: Any) -> None:
    config = path / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"].update(changes)
    config.write_text(json.dumps(content))


def unchanged(model: Any, path: Path, match: str, error: type[Exception] = ValueError) -> None:
    """The load raises, and leaves every value, class and file as it was."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        nc.load_quantized(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(layer) is nn.Linear for layer in model)


def test_scales_of_other_tiles_are_refused(tmp_path: Path) -> None:
    _, path = saved("block", tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    (key,) = [key for key in tensors if key.startswith("0.weight_scale")]
    safetensors.torch.save_file({**tensors, key: torch.ones(1, 1)}, path / "model.safetensors")
    told = (
        r"the scales of '0.weight' are \(1, 1\), and a weight of \(224, 160\) has \[2, 2\] tiles of 128 x 128"
    )
    unchanged(stack(160, 224, 96), path, told)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_decode_to_nothing_are_refused(name: str, scale: float, tmp_path: Path) -> None:
    _, path = saved(name, tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    key = next(key for key in sorted(tensors, reverse=True) if "_scale" in key)
    tensors[key].view(-1)[-1] = scale
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    unchanged(stack(160, 224, 96), path, "must be finite and positive")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e5m2, torch.int32, torch.bool])
def test_codes_without_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their values are codes: cast, they would be wrong weights."""
    _, path = saved("current", tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    for key in ("1.weight", "0.bias"):
        changed = dict(tensors)
        changed[key] = torch.ones(changed[key].shape).to(dtype)
        changed.pop(f"{key}_scale", None)
        safetensors.torch.save_file(changed, path / "model.safetensors")
        unchanged(stack(160, 224, 96), path, rf"'{key}' is {dtype} in the checkpoint, torch.bfloat16")


@pytest.mark.parametrize("name, ending", [("block", "_scale_inv"), ("current", "_scale")])
def test_a_weight_without_its_scale_names_the_folder(name: str, ending: str, tmp_path: Path) -> None:
    _, path = saved(name, tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    del tensors[f"1.weight{ending}"]
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    told = rf"{name} has '1.weight' in FP8 without its scale '1.weight{ending}'; copy the checkpoint again"
    unchanged(stack(160, 224, 96), path, told)


def test_a_checkpoint_without_fp8_weights_changes_nothing(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    plain = {key: torch.ones_like(value) for key, value in stack(160, 224, 96).state_dict().items()}
    safetensors.torch.save_file(plain, path / "model.safetensors")
    unchanged(stack(160, 224, 96), path, "no weight in FP8")


def test_a_layer_that_cannot_be_converted_changes_nothing(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    model = stack(160, 224, 96)
    model[1].forward = model[1].forward
    unchanged(model, path, r"'1' of the model cannot be converted: its forward was replaced")
    tied = stack(160, 224, 96)
    tied.again = nn.Linear(224, 96)
    tied.again.weight = tied[1].weight
    unchanged(tied, path, "'1' of the model cannot be converted: its weight is tied")


def split(path: Path) -> dict[str, str]:
    """A checkpoint of two files and an index, beside a file of an earlier one."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    files = {"a.safetensors": {}, "b.safetensors": {}}  # type: ignore[var-annotated]
    for key, value in tensors.items():
        files["a.safetensors" if key.startswith("0.") else "b.safetensors"][key] = value
    for file, content in files.items():
        safetensors.torch.save_file(content, path / file)
    stale = {key: torch.full_like(value.float(), -2.0).to(value.dtype) for key, value in tensors.items()}
    safetensors.torch.save_file(stale, path / "model.safetensors")
    safetensors.torch.save_file(stale, path / "z.safetensors")
    named = {key: file for file, content in files.items() for key in content}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return named


def test_the_index_says_which_files_are_read(tmp_path: Path) -> None:
    model, path = saved("block", tmp_path)
    named = split(path)
    index = path / "model.safetensors.index.json"
    again = stack(160, 224, 96)
    nc.load_quantized(again, path)
    x = torch.randn(8, 160, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))
    index.unlink()
    unchanged(stack(160, 224, 96), path, r"has '\S+' in a.safetensors and in model.safetensors, and no")
    wrong = {
        "which b.safetensors does not have": {**named, "more": "b.safetensors"},
        "has no c.safetensors, which": {**named, "0.weight": "c.safetensors"},
        r"in '../x/b.safetensors', which is no safetensors file": {**named, "0.weight": "../x/b.safetensors"},
        r"in 3, which is no safetensors file": {**named, "0.weight": 3},
        "no weight_map": {},
    }
    for match, weight_map in wrong.items():
        index.write_text(json.dumps({"weight_map": weight_map}))
        missing = FileNotFoundError if "has no c." in match else ValueError
        unchanged(stack(160, 224, 96), path, match, missing)


@pytest.mark.parametrize("meta", [False, True])
def test_no_value_stays_in_the_file(meta: bool, tmp_path: Path) -> None:
    """A weight that is mapped changes with the file, and a file cut short ends the process (SIGBUS)."""
    model, path = saved("block", tmp_path)
    file = path / "model.safetensors"
    again = stack(160, 224, 96)
    again.register_buffer("more", torch.zeros(3, device=DEVICE))
    tensors = {**safetensors.torch.load_file(file), "more": torch.ones(3)}
    safetensors.torch.save_file(tensors, file)
    again = again.to("meta") if meta else again
    nc.load_quantized(again, path)
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    again.to(DEVICE)
    x = torch.randn(8, 160, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(again[0](x), model[0](x)) and torch.equal(again[:2](x), model(x))
    assert again.more.eq(1).all()


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "config, match",
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "load_quantized reads FP8"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
            "load_quantized reads FP8",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": 3}},
            "load_quantized reads FP8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {}}},
            },
            "load_quantized reads FP8",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "load_quantized reads FP8"),
        ({"quant_method": "fp8", "weight_block_size": {"a": 1}}, "load_quantized reads FP8"),
        ("fp8", "load_quantized reads FP8"),
        ([1], "load_quantized reads FP8"),
        (3, "load_quantized reads FP8"),
        ("x" * 10_000, r"x\.\.\.x*'; load_quantized reads"),
    ],
)
def test_configs_of_other_forms_are_refused(config: Any, match: str, tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    unchanged(stack(160, 224, 96), path, match)


@pytest.mark.parametrize(
    "text, match",
    [("[]", "is a JSON list"), ("{", "is not JSON"), (DEEP, "is not JSON"), ("\udcff", "is not JSON")],
)
def test_configs_that_are_no_objects_are_refused(text: str, match: str, tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    unchanged(stack(160, 224, 96), path, match)


def test_files_without_end_are_not_read(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        _, path = saved("current", tmp_path / name)
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to("/dev/zero")
        unchanged(stack(160, 224, 96), path, f"{name} is no file of at most")
        (path / name).unlink()
        with (path / name).open("wb") as file:
            file.truncate(2**33)
        unchanged(stack(160, 224, 96), path, f"{name} is no file of at most")


def test_a_damaged_file_of_tensors_is_refused(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    file = path / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-10], content[:4], b"\xff" * 8 + content[8:], b"\x80\x04N."):
        file.write_bytes(damaged)
        unchanged(stack(160, 224, 96), path, "is damaged or no safetensors file")


def test_pickled_weights_beside_a_config_name_the_way_to_safetensors(tmp_path: Path) -> None:
    _, path = saved("current", tmp_path)
    file = path / "model.safetensors"
    torch.save(safetensors.torch.load_file(file), path / "pytorch_model.bin")
    file.unlink()
    told = (
        r"has 'pytorch_model.bin' and no safetensors file; for each file run "
        r"safetensors.torch.save_file\(torch.load\(file, weights_only=True\), file.with_suffix\('.safetensors'\)\)"
    )
    with pytest.raises(FileNotFoundError, match=told) as raised:
        nc.load_quantized(stack(160, 224, 96), path)
    assert len(str(raised.value)) - len(str(path)) < 250
    file = path / "pytorch_model.bin"
    safetensors.torch.save_file(torch.load(file, weights_only=True), file.with_suffix(".safetensors"))
    nc.load_quantized(stack(160, 224, 96), path)


def test_a_folder_without_a_checkpoint_tells_what_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "old").mkdir()
    torch.save({"0.weight": torch.zeros(32, 32)}, tmp_path / "old" / "pytorch_model.bin")
    safetensors.torch.save_file({"0.weight": torch.zeros(32, 32)}, tmp_path / "plain" / "model.safetensors")
    for name, told in {
        "absent": "absent is no folder; give the folder that nc.export",
        "empty": "empty is empty; give the folder that nc.export",
        "plain": r"plain has 'model.safetensors' and no config.json, .*; put it beside them, or .*load_state_dict",
        "old": r"old has 'pytorch_model.bin' and no safetensors file, .*torch.load\(file, weights_only=True\)",
    }.items():
        with pytest.raises(FileNotFoundError, match=told) as raised:
            nc.load_quantized(model, tmp_path / name)
        assert raised.value.__suppress_context__
    with pytest.raises(NotADirectoryError, match="model.safetensors is a file; give its folder, .*plain$"):
        nc.load_quantized(model, tmp_path / "plain" / "model.safetensors")


def test_the_name_of_a_model_on_the_hub_is_told_from_a_folder() -> None:
    told = (
        r"org/model is no folder; of a model on the Hub give huggingface_hub.snapshot_download\('org/model'\)"
    )
    with pytest.raises(FileNotFoundError, match=told):
        nc.load_quantized(nn.Sequential(nn.Linear(32, 32)), "org/model")


@pytest.mark.gpu
def test_stored_weights_are_on_the_device_of_the_model(tmp_path: Path) -> None:
    model, path = saved("block", tmp_path)
    again = nc.load_quantized(stack(160, 224, 96).to("cuda"), path)
    assert {parameter.device.type for parameter in again.parameters()} == {"cuda"}
    x = torch.randn(8, 160, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))
