"""``load_quantized``: FP8 checkpoints of others into a model whose frozen weights stay as they were stored."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .._device import HIGH_PRECISION
from ..convert import convert
from ..convert.find import gemm_modules
from ..convert.stored import stored_quantizer, uses_of_parameters
from ..dynamo import TensorProto
from ..formats import FLOAT8_BLOCK, FLOAT8_BLOCK_2D, FLOAT8_BLOCK_SCALE_ALIGNMENT, cdiv, round_up
from ..layers.set_recipe import Model
from ..nn import Linear
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from ..state import checked_recipe
from ..upstream.modules import own_buffers, own_parameters

INDEX = "model.safetensors.index.json"
LARGEST_CONFIG, LARGEST_INDEX = 2**24, 2**28  # bytes
_HIGH_PRECISION = (*HIGH_PRECISION, torch.float64)


def load_quantized(model: Model, path: str | Path, recipe: Recipe | str | None = None) -> Model:
    """Load a checkpoint of FP8 weights, and convert their layers: its codes and scales become the weights.

    No weight is decoded and rounded again. Each is the one quantized copy that the GEMMs read, frozen, as in
    ``convert(weights="stored")``. All other tensors load unchanged. Values are copied out of the files. Parameters may
    be on the meta device, and so may buffers that the checkpoint has.

    Args:
        model: with the names of the checkpoint; its quantized weights belong to plain ``nn.Linear``s.
        path: a folder with ``config.json``, whose ``quantization_config`` is DeepSeek's (``fp8``, tiles of 128 x 128)
            or compressed-tensors' (FP8, per tensor or in such tiles), and safetensors files: those that
            ``model.safetensors.index.json`` names if present, else all.
        recipe: for the layers; default Float8BlockScaling for tiles, Float8CurrentScaling for weights with one scale.
    Returns:
        ``model``; :func:`narrowcast.receipt` lists the converted layers.

    Nothing changes if it raises.

    Raises:
        FileNotFoundError: there is no config.json or safetensors file.
        ValueError: a file is damaged, too large or not the expected JSON; the checkpoint has another format or no FP8
            weights; the recipe scales weights differently; a weight has another shape, or no finite, positive scales; a
            tensor has another kind of dtype.
        RuntimeError: keys are missing on either side, or a buffer on the meta device is not in the checkpoint.
    """
    _checks.module("model", model)
    _checks.path("path", path)
    path = Path(path)
    config = _json_object(path / "config.json", LARGEST_CONFIG)
    suffix, tiles = _scaling(config.get("quantization_config"))
    default = Float8BlockScaling() if tiles else Float8CurrentScaling()
    recipe = checked_recipe(recipe, "load_quantized") or default
    tensors = _tensors(path)
    codes = [key for key, value in tensors.items() if value.dtype == torch.float8_e4m3fn]
    if not codes:
        raise ValueError(f"{path} has no weight in FP8 (E4M3), though its quantization_config says so")
    linears = _linears(model)
    weights: dict[str, Any] = {}
    for key in codes:
        if key + suffix not in tensors:
            raise ValueError(f"the checkpoint has {key!r} in FP8 without {key + suffix!r}")
        module = _linear_of(linears, key, tensors[key])
        weights[key] = _assembled(
            recipe, key, tensors.pop(key), tensors.pop(key + suffix), tiles, module.weight.dtype
        )
    _check_tensors(model, tensors, weights)
    for key, weight in weights.items():
        _put(model, key, nn.Parameter(weight, requires_grad=False))
    for key, value in tensors.items():
        _put(model, key, value)
    names = [key.removesuffix(".weight") for key in weights]
    return convert(model, recipe, only=names, weights="stored")


def _json_object(file: Path, at_most: int) -> dict[str, Any]:
    """
    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no file, too large, or no JSON object.
    """
    try:
        found = file.stat()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file.parent} has no {file.name}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > at_most:
        raise ValueError(
            f"{file} is no file of at most {at_most} bytes; {file.name} of a checkpoint is small JSON"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is a JSON {type(content).__name__}; it must be an object")
    return content


def _scaling(config: Any) -> tuple[str, bool]:
    """Return the suffix of a weight's key for its scales, and whether they are tiles'.

    Raises:
        ValueError: a quantization that no recipe has for weights that are stored once.
    """
    found = config if isinstance(config, dict) else {}
    method, tile = found.get("quant_method"), [FLOAT8_BLOCK, FLOAT8_BLOCK]
    if method == "fp8" and found.get("weight_block_size") == tile:
        return "_scale_inv", True
    if method == "compressed-tensors" and found.get("format") in ("float-quantized", "naive-quantized"):
        groups = found.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        schemes = [group.get("weights") if isinstance(group, dict) else None for group in groups]
        read = [one if isinstance(one, dict) else {} for one in schemes]
        if read and all(one.get("num_bits") == 8 and one.get("strategy") == "tensor" for one in read):
            return "_scale", False
        if read and all(
            one.get("strategy") == "block" and one.get("block_structure") == tile for one in read
        ):
            return "_scale", True
    shown = repr(config)
    raise ValueError(
        f"the checkpoint's quantization_config is {shown if len(shown) < 2000 else shown[:2000] + '...'}; "
        "load_quantized reads FP8 with 128 x 128 tiles (quant_method 'fp8', or compressed-tensors' strategy 'block') "
        "and with one scale per tensor (compressed-tensors' strategy 'tensor')"
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, mapped from its files: what keeps one copies it.

    Raises:
        FileNotFoundError: no safetensors.
        ValueError: a damaged file, or one name in two files.
    """
    from safetensors import SafetensorError, safe_open

    named = _index(path)
    files = sorted(path.glob("*.safetensors") if named is None else {path / file for file in named.values()})
    if not files:
        raise FileNotFoundError(f"{path} has no safetensors files")
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{path} has no {file.name}, which {INDEX} names")
        try:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                for name in sorted(names):
                    if named is not None and named.get(name) != file.name:
                        continue  # a stale copy: the index says where a tensor is
                    if name in places:
                        raise ValueError(
                            f"{path} has {name!r} in {places[name]} and in {file.name}, and no {INDEX} says which; "
                            "remove the file that does not belong to the checkpoint"
                        )
                    tensors[name], places[name] = opened.get_tensor(name), file.name
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error
    lost = sorted(set(named or ()) - set(tensors))
    if lost:
        raise ValueError(f"{INDEX} of {path} names {lost[0]!r}, which {(named or {})[lost[0]]} does not have")
    return tensors


def _index(path: Path) -> dict[str, str] | None:
    """Return the file of each tensor as the checkpoint's index says; None if there is no index."""
    if not (path / INDEX).exists():
        return None
    named = _json_object(path / INDEX, LARGEST_INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(f"{path / INDEX} has no weight_map from tensors to files")
    for name, file in named.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or "\\" in file
            or not file.endswith(".safetensors")
        ):
            raise ValueError(
                f"{path / INDEX} has {name!r} in {file!r}, which is no safetensors file beside it"
            )
    return named


def _linears(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return modules with weights of GEMMs by name, and why each cannot hold a stored weight, "" if it can."""
    uses, found = uses_of_parameters(model), {}
    for one in gemm_modules(model):
        reason = one.reason
        if one.layer is Linear and uses[id(one.module.weight)] > 1:
            reason = "its weight is tied"
        found[one.name] = (one.module, reason)
    return found


def _linear_of(linears: dict[str, tuple[nn.Module, str]], key: str, codes: Tensor) -> nn.Linear:
    """Return the layer that a quantized weight belongs to.

    Raises:
        ValueError: it is no ``nn.Linear`` that can be converted, or has a weight of another shape.
    """
    name = key.removesuffix(".weight")
    module, reason = linears.get(name, (None, ""))
    if type(module) is not nn.Linear or not key.endswith("weight"):
        raise ValueError(
            f"{key!r} is in FP8, and {name!r} of the model is {type(module).__name__}, not nn.Linear"
        )
    if reason:
        raise ValueError(f"{key!r} is in FP8, and {name!r} of the model cannot be converted: {reason}")
    if module.weight.shape != codes.shape:
        raise ValueError(
            f"{key!r} is {tuple(codes.shape)} in the checkpoint, {tuple(module.weight.shape)} in the model"
        )
    return module


def _assembled(
    recipe: Recipe, key: str, codes: Tensor, scale: Tensor, tiles: bool, dtype: torch.dtype
) -> Any:
    """Return the quantized weight that codes (N, K) and their scales are, with memory of its own."""
    quantizer = stored_quantizer(recipe, key.removesuffix(".weight"))
    if (quantizer._format_layout() is FLOAT8_BLOCK_2D) != tiles:
        wanted = "Float8BlockScaling" if tiles else "Float8CurrentScaling or DelayedScaling"
        raise ValueError(f"recipe is {recipe!r}, and the checkpoint's weights are those of {wanted}")
    if not scale.is_floating_point():
        raise ValueError(f"the scales of {key!r} are {scale.dtype}; floating point is read")
    if tiles:
        expected = [cdiv(size, FLOAT8_BLOCK) for size in codes.shape]
        if list(scale.shape) != expected:
            raise ValueError(
                f"the scales of {key!r} are {tuple(scale.shape)}, of its tiles there are {expected}"
            )
    elif scale.numel() != 1:
        raise ValueError(f"the scales of {key!r} are {tuple(scale.shape)}; one scale per tensor is read")
    scale = scale.to(torch.float32, copy=True)
    wrong = ~(scale.isfinite() & (scale > 0))
    if wrong.any():
        raise ValueError(
            f"the scales of {key!r} hold {scale[wrong][0].item()}; they must be finite and positive, so the file is "
            "damaged or of another format"
        )
    if tiles:
        padding = round_up(scale.shape[1], FLOAT8_BLOCK_SCALE_ALIGNMENT) - scale.shape[1]
        scale = torch.nn.functional.pad(scale, (0, padding))
    buffers = [codes.view(torch.uint8).clone(), scale if tiles else scale.reshape(1)]
    return TensorProto(tuple(codes.shape), dtype, quantizer).assemble(buffers)


def _check_tensors(model: nn.Module, tensors: dict[str, Tensor], weights: dict[str, Any]) -> None:
    """Raises:
    RuntimeError: the model or the checkpoint has what the other has not; names of a tied parameter count as one. Or
    the checkpoint cannot have what is on the meta device.
    ValueError: tensors of another shape, or of a dtype whose values are codes, or that do not fit.
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
        wanted = state[key].dtype
        if wanted in _HIGH_PRECISION:
            fits = value.dtype in _HIGH_PRECISION
        else:
            exact = not value.is_floating_point() and torch.can_cast(value.dtype, wanted)
            fits = value.dtype == wanted or (exact and value.dtype.itemsize <= wanted.itemsize)
        if not fits:
            raise ValueError(
                f"{key!r} is {value.dtype} in the checkpoint, {wanted} in the model; "
                "load_quantized reads weights in E4M3 with scales, and tensors in high precision"
            )


@torch.no_grad()
def _put(model: nn.Module, key: str, value: Tensor) -> None:
    """Store a value in a parameter or buffer under all its names; one on the meta device is replaced."""
    owner, _, name = key.rpartition(".")
    module = model.get_submodule(owner)
    old: Any = getattr(module, name)
    if not isinstance(value, nn.Parameter) and not old.is_meta:
        old.copy_(value)
        return
    new: Any = value
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value.to(old.dtype, copy=True), requires_grad=old.requires_grad)
    elif not isinstance(value, nn.Parameter):
        new = value.clone()
    for other in model.modules():
        for names in (own_parameters(other), own_buffers(other)):
            names.update({own: new for own, held in names.items() if held is old})
