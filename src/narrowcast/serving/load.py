"""``load_quantized``: FP8 checkpoints of others into a model whose frozen weights stay as they were stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import Receipt, convert
from ..convert.stored import stored_quantizer
from ..dynamo import TensorProto
from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_2D, FLOAT8_BLOCK_SCALE_ALIGNMENT, cdiv, round_up
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Recipe


def load_quantized(model: nn.Module, path: str | Path, recipe: Recipe | None = None) -> Receipt:
    """Load a checkpoint of FP8 weights, and convert the layers that have them: its codes and scales are the weights.

    Nothing is decoded and rounded again: each such weight is kept as the one quantized copy that the GEMMs read,
    frozen, as ``convert(weights="stored")`` would make it. All other tensors load as they are.
    Parameters may be on the meta device, and so may buffers that the checkpoint holds.

    Args:
        model: with the names of the checkpoint; its quantized weights belong to plain ``nn.Linear``s.
        path: a folder with ``config.json``, whose ``quantization_config`` is DeepSeek's (``fp8``, tiles of 128 x 128)
            or of compressed-tensors (FP8, per tensor or in such tiles), and safetensors files.
        recipe: for the layers; default Float8BlockScaling for tiles, Float8CurrentScaling for weights with one scale.
    Returns:
        the receipt of the conversion.
    Raises (with nothing changed):
        FileNotFoundError: no config.json or safetensors. ValueError: a checkpoint of another format, a recipe whose
        weights are scaled otherwise, or a weight of another shape. RuntimeError: keys that are missing on either side,
        or a buffer on the meta device that no checkpoint holds.
    """
    path = Path(path)
    suffix, tiles = _scaling(json.loads((path / "config.json").read_text()).get("quantization_config"))
    recipe = recipe or (Float8BlockScaling() if tiles else Float8CurrentScaling())
    tensors = _tensors(path)
    codes = [key for key, value in tensors.items() if value.dtype == torch.float8_e4m3fn]
    weights: dict[str, Any] = {}
    for key in codes:
        if key + suffix not in tensors:
            raise ValueError(f"the checkpoint has {key!r} in FP8 without {key + suffix!r}")
        module = _linear_of(model, key, tensors[key])
        weights[key] = _assembled(
            recipe, key, tensors.pop(key), tensors.pop(key + suffix), tiles, module.weight.dtype
        )
    _check_keys(model, tensors, weights)
    for key, weight in weights.items():
        _put(model, key, nn.Parameter(weight, requires_grad=False))
    for key, value in tensors.items():
        _put(model, key, value)
    return convert(model, recipe, only=[key.removesuffix(".weight") for key in weights], weights="stored")


def _scaling(config: dict[str, Any] | None) -> tuple[str, bool]:
    """(what is put behind a weight's key for its scales, whether they are those of tiles).

    Raises:
        ValueError: a quantization that no recipe has for weights that are stored once.
    """
    config = config or {}
    method, tile = config.get("quant_method"), [FLOAT8_BLOCK, FLOAT8_BLOCK]
    if method == "fp8" and list(config.get("weight_block_size") or ()) == tile:
        return "_scale_inv", True
    if method == "compressed-tensors" and config.get("format") in ("float-quantized", "naive-quantized"):
        schemes = [group["weights"] for group in config["config_groups"].values()]
        if all(one["num_bits"] == 8 and one["strategy"] == "tensor" for one in schemes):
            return "_scale", False
        if all(one["strategy"] == "block" and list(one["block_structure"]) == tile for one in schemes):
            return "_scale", True
    raise ValueError(
        f"the checkpoint's quantization_config is {config or None}; load_quantized reads FP8 with 128 x 128 tiles "
        "(quant_method 'fp8', or compressed-tensors' strategy 'block') and with one scale per tensor "
        "(compressed-tensors' strategy 'tensor')"
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, mapped from its files."""
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} has no safetensors files")
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            tensors.update({name: opened.get_tensor(name) for name in names})
    return tensors


def _linear_of(model: nn.Module, key: str, codes: Tensor) -> nn.Linear:
    """The layer that a quantized weight belongs to.

    Raises:
        ValueError: it is no ``nn.Linear``, or has a weight of another shape.
    """
    name = key.removesuffix(".weight")
    module = dict(model.named_modules()).get(name)
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{key!r} is in FP8, and {name!r} of the model is {type(module).__name__}, not nn.Linear"
        )
    if module.weight.shape != codes.shape:
        raise ValueError(
            f"{key!r} is {tuple(codes.shape)} in the checkpoint, {tuple(module.weight.shape)} in the model"
        )
    return module


def _assembled(
    recipe: Recipe, key: str, codes: Tensor, scale: Tensor, tiles: bool, dtype: torch.dtype
) -> Any:
    """The quantized weight that codes (N, K) and their scales are."""
    quantizer = stored_quantizer(recipe, key.removesuffix(".weight"))
    if (quantizer._format_layout() is FLOAT8_BLOCK_2D) != tiles:
        wanted = "Float8BlockScaling" if tiles else "Float8CurrentScaling or DelayedScaling"
        raise ValueError(f"recipe is {recipe!r}, and the checkpoint's weights are those of {wanted}")
    scale = scale.float()
    if tiles:
        expected = [cdiv(size, FLOAT8_BLOCK) for size in codes.shape]
        if list(scale.shape) != expected:
            raise ValueError(
                f"the scales of {key!r} are {tuple(scale.shape)}, of its tiles there are {expected}"
            )
        padding = round_up(expected[1], FLOAT8_BLOCK_SCALE_ALIGNMENT) - expected[1]
        scale = torch.nn.functional.pad(scale, (0, padding))
    elif scale.numel() != 1:
        raise ValueError(f"the scales of {key!r} are {tuple(scale.shape)}; one scale per tensor is read")
    buffers = [codes.view(torch.uint8), scale if tiles else scale.reshape(1)]
    return TensorProto(tuple(codes.shape), dtype, quantizer).assemble(buffers)


def _check_keys(model: nn.Module, tensors: dict[str, Tensor], weights: dict[str, Any]) -> None:
    """Raises:
    RuntimeError: the model or the checkpoint has what the other has not; names of a tied parameter count as one. Or
    the checkpoint cannot have what is on the meta device.
    ValueError: tensors of another shape.
    """
    state = model.state_dict(keep_vars=True)
    empty = [key for key, value in model.named_buffers() if value.is_meta and key not in state]
    if empty:
        raise RuntimeError(
            f"the buffers {empty} are on the meta device, and no checkpoint holds what is not in the state dict; make "
            "the model with real buffers, as accelerate.init_empty_weights() and then model.tie_weights() do"
        )
    given = {id(state[key]) for key in (*tensors, *weights) if key in state}
    missing = [key for key, value in state.items() if id(value) not in given]
    unexpected = [key for key in tensors if key not in state]
    if missing or unexpected:
        raise RuntimeError(f"the checkpoint lacks {missing} of the model, which lacks its {unexpected}")
    for key, value in tensors.items():
        if value.shape != state[key].shape:
            raise ValueError(
                f"{key!r} is {tuple(value.shape)} in the checkpoint, {tuple(state[key].shape)} in the model"
            )


@torch.no_grad()
def _put(model: nn.Module, key: str, value: Tensor) -> None:
    """Have a parameter or buffer hold a value, under all its names; one on the meta device is replaced."""
    owner, _, name = key.rpartition(".")
    module = model.get_submodule(owner)
    old: Any = getattr(module, name)
    if not isinstance(value, nn.Parameter) and not old.is_meta:
        old.copy_(value)
        return
    new: Any = value
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
    for other in model.modules():
        for names in (other._parameters, other._buffers):
            names.update({own: new for own, held in names.items() if held is old})
