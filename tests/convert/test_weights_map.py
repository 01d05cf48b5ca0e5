"""Stored weights outside of the model: codes stay codes through what accelerate does with them, itself and by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.convert.stored import DECODED

from .test_stored import frozen, inputs, step

CURRENT = QUANTIZED["current"]
WAYS = ("stored", *DECODED)


def stored(weights: Any, *sizes: int) -> Any:
    return nc.convert(frozen(*sizes), CURRENT, weights=weights)


def codes(weight: Any) -> list[Tensor]:
    return [buffer.cpu() for buffer in weight.get_data_tensors() if buffer is not None]


def same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and all(torch.equal(a, b) for a, b in zip(codes(first), codes(second)))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("weights", WAYS)
def test_the_map_has_codes_under_all_names(weights: Any, on_disk: bool, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'narrowcast[serving]'")
    model = stored(weights, 160, 224, 96)
    model.more = model[0]
    model.register_buffer("table", torch.arange(3.0))
    found = nc.weights_map(model, tmp_path / "weights" if on_disk else None)
    assert [*found] == [
        *dict(model.named_parameters(remove_duplicate=False)),
        *dict(model.named_buffers(remove_duplicate=False)),
    ]
    for name, tensor in found.items():
        held: Any = model.get_buffer(name) if name == "table" else model.get_parameter(name)
        assert tensor.device.type == "cpu" and tensor.dtype == held.dtype and tensor.shape == held.shape
        assert same(tensor, held.detach()) if name.endswith("weight") else torch.equal(tensor, held.cpu())


def test_the_map_on_disk_holds_nothing_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'narrowcast[serving]'")
    model = stored("nvfp4", 160, 224)
    found: Any = nc.weights_map(model, tmp_path)
    assert all(tensor.is_meta for tensor in found._empty.values())
    bytes_of = sum(buffer.nbytes for buffer in codes(model[0].weight)) + model[0].bias.nbytes
    assert bytes_of <= sum(file.stat().st_size for file in tmp_path.iterdir()) < bytes_of + 1024
    with pytest.raises(FileExistsError, match="is not empty; give weights_map a new folder"):
        nc.weights_map(model, tmp_path)


def put(module: Any, name: str, device: str, value: Any = None) -> None:
    """What accelerate 1.15 does in ``set_module_tensor_to_device``, with one device less to think of."""
    old = module._parameters[name]
    if value is not None:
        value = value.to(old.dtype, non_blocking=False)
    new = (old if value is None else value).to(device, non_blocking=False)
    module._parameters[name] = type(old)(new, requires_grad=old.requires_grad).to(device, non_blocking=False)


@pytest.mark.parametrize("weights", WAYS)
def test_codes_go_to_the_meta_device_and_come_back(weights: Any) -> None:
    model = stored(weights, 160, 224)
    before, expected = model[0].weight, step(model, inputs(160))
    found = nc.weights_map(model)
    for _ in range(2):
        put(model[0], "weight", "meta")
        assert model[0].weight.is_meta and type(model[0].weight) is type(before)
        put(model[0], "weight", DEVICE, found["0.weight"])
        weight: Any = model[0].weight
        assert isinstance(weight, nn.Parameter) and not weight.requires_grad and same(weight, before)
        assert all(torch.equal(a, b) for a, b in zip(step(model, inputs(160)), expected))
    # a parameter still decodes under a dtype
    assert type(weight.to(weight.dtype)) is Tensor and type(found["0.weight"].to(torch.float64)) is Tensor


def test_what_has_no_codes_is_refused() -> None:
    model = stored("stored", 160, 224)
    put(model[0], "weight", "meta")
    with pytest.raises(
        TypeError, match=r"Float8Tensor is made of a Tensor, which has no codes. If accelerate does"
    ):
        put(
            model[0],
            "weight",
            DEVICE,
            model.state_dict()["0.bias"].expand(160, 224).t().contiguous().bfloat16(),
        )
    with pytest.raises(
        ValueError, match="'0.weight' is on the meta device; make the map of a whole model, before"
    ):
        nc.weights_map(model)
    with pytest.raises(TypeError, match="model"):
        nc.weights_map(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folder"):
        nc.weights_map(stored("stored", 160, 224), 3)  # type: ignore[arg-type]


OFFLOADS: dict[str, Callable[[Any, Any], Any]] = {
    "cpu_offload": lambda a, m: a.cpu_offload(m, DEVICE, state_dict=nc.weights_map(m)),
    "cpu_offload, on disk": lambda a, m: a.cpu_offload(
        m, DEVICE, state_dict=nc.weights_map(m, tempfile.mkdtemp())
    ),
    "dispatch_model": lambda a, m: a.dispatch_model(
        m,
        {"0": DEVICE, "1": "disk"},
        main_device=DEVICE,
        state_dict=nc.weights_map(m),
        offload_dir=tempfile.mkdtemp(),
    ),
    "dispatch_model, no offload": lambda a, m: a.dispatch_model(m, {"": DEVICE}, force_hooks=True),
}


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("weights", WAYS)
def test_accelerate_offloads_codes(weights: Any, offload: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    model = stored(weights, 160, 224, 96)
    held, expected = [layer.weight for layer in model], step(model, inputs(160))
    away = offload(accelerate, model)
    seen: list[Any] = []
    for layer in away:
        forward = layer._old_forward  # what accelerate calls between its hooks

        def noted(x: Tensor, layer: Any = layer, forward: Any = forward) -> Tensor:
            seen.append(layer.weight)
            return forward(x)

        layer._old_forward = noted
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(away, inputs(160)), expected))
    assert len(seen) == 4 and all(same(weight, held[i % 2]) for i, weight in enumerate(seen))


WITHOUT_MAP: dict[str, Callable[[Any, Any], Any]] = {
    "cpu_offload": lambda a, m: a.cpu_offload(m, DEVICE),
    "disk_offload": lambda a, m: a.disk_offload(m, tempfile.mkdtemp(), DEVICE),
    "dispatch_model": lambda a, m: a.dispatch_model(
        m, {"0": DEVICE, "1": "disk"}, main_device=DEVICE, offload_dir=tempfile.mkdtemp()
    ),
    "attach_align_device_hook": lambda a, m: a.hooks.attach_align_device_hook(m, DEVICE, offload=True),
}


@pytest.mark.parametrize("offload", WITHOUT_MAP.values(), ids=WITHOUT_MAP)
@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
def test_accelerate_without_the_map_is_refused_when_it_offloads(weights: Any, offload: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    layers = stored(weights, 160, 224, 96)
    for model in (layers, layers[1]) if offload is not WITHOUT_MAP["dispatch_model"] else (layers,):
        with pytest.raises(
            TypeError,
            match=r"of a Linear away .* give cpu_offload or dispatch_model state_dict=narrowcast\.weights_map",
        ):
            offload(accelerate, model)


def test_accelerate_offloads_what_is_not_stored_and_takes_its_hooks_off() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    model = nc.convert(frozen(160, 224), CURRENT)
    expected = step(model, inputs(160))
    accelerate.disk_offload(model, tempfile.mkdtemp(), DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(step(model, inputs(160)), expected))
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not hasattr(model[0], "_hf_hook") and not model[0].weight.is_meta
    assert all(torch.equal(a, b) for a, b in zip(step(model, inputs(160)), expected))
