"""``export``: a checkpoint for servers, in the bits that the training GEMMs read.

What a layer multiplies by in training is its weight, quantized under its recipe. Those codes and scales are what is
written, so the served model is the one that was evaluated, and no quantization tool runs in between.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import path as path_given
from ..convert.conv1d import Conv1DLayer
from ..convert.experts import StackedExpertsLayer
from ..convert.find import Found, Weight, gemm_modules
from ..convert.stored import uses_of_parameters
from ..layers import DelayedLayer, GroupedLinearLayer, LinearLayer, Stage
from ..layers.extra_state import EXTRA_STATE
from ..quantizers import Operand, buffers_of
from ..recipe import Recipe, linear_plan
from ..state import checked_recipe
from ..tensors import QuantizedTensor
from .formats import (
    CHECKPOINT_FORMATS,
    CheckpointFormat,
    WeightFormat,
    compressed_tensors_config,
    fine_grained_config,
)


@dataclass(frozen=True)
class ExportedWeight:
    """One GEMM weight: ``name`` is its key, ``format`` its format, ``reason`` why it was not quantized."""

    name: str
    format: str
    reason: str = ""


@dataclass(frozen=True)
class Exported:
    """The result of :func:`export`.

    Attributes:
        bytes: bytes of all tensors.
        bytes_before: bytes of the same in the model's dtypes.
    """

    path: Path
    format: str
    weights: tuple[ExportedWeight, ...]
    bytes: int
    bytes_before: int

    def __str__(self) -> str:
        quantized = sum(not one.reason for one in self.weights)
        lines = [
            f"{self.path}: {self.format}, {quantized} of {len(self.weights)} weights quantized, "
            f"{self.bytes:,} bytes of {self.bytes_before:,}"
        ]
        reasons = Counter(one.reason for one in self.weights if one.reason)
        lines += [f"  {count} in high precision: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


def export(
    model: nn.Module,
    path: str | Path,
    *,
    format: str,
    recipe: Recipe | str | None = None,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write a model as safetensors with a ``quantization_config``, with the weights that the training GEMMs read.

    A model of Transformers also writes its own files (``config.json``, ``generation_config.json``). For other models
    ``config.json`` holds only the ``quantization_config``. A tied tensor is written once, under the name that
    Transformers keeps; in other models under its first name. Weights that are tied, grouped, fused from parts, or in
    layers without a recipe stay in high precision; the config and the result list them.

    Args:
        path: a folder that does not exist yet, or is empty; it appears when it is complete.
        format: "hf-fp8-block128" (DeepSeek's), "compressed-tensors" (per tensor, 128 x 128, MXFP8 or NVFP4, by the
            recipe), "mxfp8" or "nvfp4" (compressed-tensors of this format), or "bf16" (no quantization).
        recipe: a recipe or its name; overrides the recipes of layers that have one.
        dtype: of tensors in high precision; default: unchanged, bf16 for "bf16".

    Nothing is written if it raises.

    Raises:
        ValueError: the format is unknown, cannot hold a recipe's weights, nothing can be quantized, or parameters are
            on the meta device.
        FileExistsError: ``path`` has files.
        ModuleNotFoundError: safetensors is not installed.
    """
    path_given("path", path)
    if not isinstance(format, str) or format not in CHECKPOINT_FORMATS:
        raise ValueError(f"format is {format!r}; use one of {', '.join(map(repr, CHECKPOINT_FORMATS))}")
    kind, path, recipe = CHECKPOINT_FORMATS[format], Path(path), checked_recipe(recipe, "export")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not empty; give export a new folder")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values to export")
    _safetensors()
    dtype = torch.bfloat16 if format == "bf16" and dtype is None else dtype
    state = _plain_state(model, dtype)
    before = _bytes(_each_once(state)[0])
    uses = uses_of_parameters(model)
    weights: list[ExportedWeight] = []
    modules: dict[str, WeightFormat] = {}
    kept: list[str] = []
    for found in gemm_modules(model):
        for weight in found.weights:
            key, reason = f"{found.name}.{weight.name}".lstrip("."), _why_not(found, weight, kind, uses)
            if not reason:
                tensors, as_format = _quantized(found, weight.name, kind, format, recipe)
                del state[key]
                state.update({key + suffix: tensor for suffix, tensor in tensors.items()})
                modules[found.name] = as_format
            weights.append(ExportedWeight(key, "high precision" if reason else as_format.name, reason))
        if found.name not in modules:
            kept.append(found.name)
    if kind.weights and not modules:
        raise ValueError(
            "no layer of the model has a weight to quantize; convert the model, or use format='bf16'"
        )
    config = None
    if kind.weights:
        config = fine_grained_config(kept) if kind.fine_grained else compressed_tensors_config(modules, kept)
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    exported = Exported(path, format, tuple(weights), _bytes(_each_once(state)[0]), before)
    _write(model, path, state, config)
    return exported


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("export writes safetensors; install it: pip install safetensors") from error
    return safetensors.torch


def _plain_state(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the state dict without what only training reads, quantized tensors decoded."""
    left_out = {
        f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, DelayedLayer)
        for own in module._state_names()
    }
    state, made = {}, {}
    for key, value in model.state_dict(keep_vars=True).items():
        if key in left_out or key.endswith(EXTRA_STATE) or not isinstance(value, Tensor):
            continue
        if id(value) not in made:  # tied tensors stay one
            plain = value.detach()
            plain = plain.dequantize() if isinstance(plain, QuantizedTensor) else plain
            plain = plain.to(dtype) if dtype is not None and plain.is_floating_point() else plain
            made[id(value)] = plain.contiguous()
        state[key] = made[id(value)]
    return state


def _each_once(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a state with tied tensors under their first name alone, and the names left out with that name.

    Other tensors that share memory are copied: safetensors writes none that do.
    """
    once: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    aliases, storages = {}, set()
    for key, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        place = (storage, tensor.storage_offset(), tensor.shape, tensor.dtype)
        if tensor.numel() and place in names:
            aliases[key] = names[place]
            continue
        names[place] = key
        once[key] = tensor.clone() if tensor.numel() and storage in storages else tensor
        storages.add(storage)
    return once, aliases


def _why_not(found: Found, weight: Weight, kind: CheckpointFormat, uses: Counter[int]) -> str:
    """Return why a weight stays in high precision; "" where it does not."""
    layer: Any = found.module
    if not kind.weights:
        return "the format has no quantized weights"
    if not isinstance(layer, LinearLayer) or layer.recipe is None:
        return "its layer has no recipe"
    if (
        isinstance(layer, (GroupedLinearLayer, StackedExpertsLayer, Conv1DLayer))
        or weight.name in layer._parts
    ):
        return f"{type(layer).__name__} has grouped or transposed weights, or ones made of parts"
    return "it is tied" if uses[id(weight.tensor)] > 1 else ""


@torch.no_grad()
def _quantized(
    found: Found, name: str, kind: CheckpointFormat, format: str, recipe: Recipe | None
) -> tuple[dict[str, Tensor], WeightFormat]:
    """A weight as it is written, by what is put after its key.

    Raises:
        ValueError: its recipe, or ``recipe`` instead, makes what the format cannot hold.
    """
    layer: Any = found.module
    stage = next(stage for stage in layer._stages if stage.weight == name)
    recipe = recipe or layer.recipe
    plan = linear_plan(recipe, stage.name, False, False, module_type=layer._module_type)
    operand = Operand.of(plan.kept_weight.quantizer, True, False) if plan.quantized else None
    written_as = None if operand is None else kind.weight_format(operand.quantizer)
    if operand is None or written_as is None:
        raise ValueError(
            f"{found.name or 'the model'} has {recipe!r}; format={format!r} holds the weights of {kind.recipes}: "
            "choose another format, or give export recipe= to quantize with"
        )
    shape = getattr(layer, name).shape
    if shape[1] % written_as.multiple:
        raise ValueError(
            f"{found.name or 'the model'} has a weight of {tuple(shape)}, and format={format!r} takes multiples of "
            f"{written_as.multiple} columns; give it no recipe before exporting: set_recipe(model, {{name: None}})"
        )
    tensors = written_as.pack(_buffers(layer, stage, operand), shape, operand.quantizer)
    if kind.fine_grained:
        tensors = {"": tensors[""], "_scale_inv": tensors["_scale"]}
    return tensors, written_as


def _buffers(layer: Any, stage: Stage, operand: Operand) -> list[Tensor]:
    """Return row-wise data and scales of a weight, as the forward's GEMM reads them."""
    weight = getattr(layer, stage.weight).detach()
    if isinstance(weight, QuantizedTensor):
        stored = buffers_of(weight)
        if stored.quantizer._format_layout() is operand.quantizer._format_layout():
            return stored.rowwise
        weight = weight.dequantize()
    scale = getattr(layer, f"{stage.prefix}scale_fwd") if operand.delayed else None
    if operand.delayed and scale is None:
        raise ValueError(
            f"{layer.name or stage.weight} has no scales of delayed scaling yet; run the model once"
        )
    return operand.quantize(weight, scale).rowwise


def _bytes(state: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _write(model: Any, path: Path, state: dict[str, Tensor], config: dict[str, Any] | None) -> None:
    """Write a folder beside ``path`` and give it its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder, state_dict=state)
        else:
            once, aliases = _each_once(state)
            # as safetensors.torch.save_model tells which names it left out
            _safetensors().save_file(once, folder / "model.safetensors", metadata={"format": "pt", **aliases})
        file = folder / "config.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        content.pop("quantization_config", None)
        if config is not None:
            content["quantization_config"] = config
        file.write_text(json.dumps(content, indent=2) + "\n")
        folder.chmod(0o755)
        if path.exists():
            path.rmdir()
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
