"""``load_quantized``: a checkpoint into a model whose frozen weights are stored quantized."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from .._checks import shown, some
from .._device import HIGH_PRECISION
from ..convert import convert
from ..convert.decisions import NOT_IN_ONLY, decisions_so_far, record_reason
from ..convert.experts import StackedExpertsLayer
from ..convert.find_modules import gemm_modules
from ..convert.receipt import Receipt, weight_name
from ..convert.stored import (
    DECODED,
    check_weights,
    nothing_to_store,
    stored_copy,
    stored_quantizer,
    stores,
    uses_of_parameters,
    why_not_stored,
)
from ..layers import RecipeOwner
from ..layers.patterns import Selectors
from ..layers.set_recipe import Model
from ..nn import Linear
from ..quantizers import Quantizer
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from ..state import checked_recipe
from ..tensors import GroupedTensor, join_members
from ..upstream.fsdp import reshard
from ..upstream.modules import own_buffers, own_parameters
from .names import CheckpointNames
from .read_formats import ReadFormat, format_of, keys_of, read_formats, without_inputs

INDEX, MODELOPT = "model.safetensors.index.json", "hf_quant_config.json"
LARGEST_CONFIG, LARGEST_INDEX = 2**24, 2**28  # bytes
_PICKLES = {".bin", ".pt", ".pth"}
_HIGH_PRECISION = (*HIGH_PRECISION, torch.float64)


def load_quantized(
    model: Model,
    path: str | Path,
    recipe: Recipe | str | None = None,
    *,
    weights: Literal["stored", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8-channel"] | None = None,
    skip: Selectors = None,
) -> Model:
    """Load a checkpoint into a model whose frozen weights are stored quantized, and convert their layers.

    The codes and scales of a quantized checkpoint become the weights: none is decoded and rounded again. The weights of
    a checkpoint in high precision are quantized one after the other, as their files are read: the model in high
    precision is never in memory. Each is frozen, as in ``convert(weights=...)``. All other tensors load unchanged.
    Values are copied out of the files. Parameters may be on the meta device, and so may buffers that the checkpoint
    has.

    Experts that the model stacks in one parameter become one quantized copy of it. They are decoded into it and frozen
    where projections that are one matrix in the model have scales of their own in the file, which the matrix would
    share, and where scales are of blocks of a column.

    Args:
        model: with the names of the checkpoint, or of Transformers, which knows them; its quantized weights belong to
            plain ``nn.Linear``s or to stacked experts.
        path: a folder with ``config.json``, and safetensors files: those that ``model.safetensors.index.json`` names if
            present, else all. The ``quantization_config`` is that of Transformers, compressed-tensors, ModelOpt, vLLM
            or FBGEMM for FP8 (a scale per tensor, per row, or per 128 x 128), MXFP8, MXFP6, MXFP4 or NVFP4; ModelOpt's
            ``hf_quant_config.json`` is read, too. Groups of layers may differ. Without one the checkpoint is in high
            precision.
        recipe: for the layers; default Float8BlockScaling for tiles, MXFP8, MXFP6 and MXFP4, Float8RowwiseScaling for
            a scale per row, else Float8CurrentScaling.
        weights: for a checkpoint in high precision alone: how :func:`narrowcast.convert` stores the weights that it
            would convert.
        skip: for a checkpoint in high precision alone: as in :func:`narrowcast.convert`.
    Returns:
        ``model``; :func:`narrowcast.receipt` lists the converted layers.

    Nothing changes if it raises.

    Raises:
        FileNotFoundError: there is no config.json or safetensors file.
        ValueError: a file is damaged, too large or not the expected JSON; the checkpoint has another format or no
            quantized weights; the recipe scales weights differently; a weight has another shape, or no finite, positive
            scales; a tensor has another kind of dtype; ``weights`` is missing, or given for a quantized checkpoint.
        RuntimeError: keys are missing on either side, or a buffer on the meta device is not in the checkpoint.
    """
    _checks.module("model", model)
    _checks.path("path", path)
    reshard(model)  # into what FSDP2 has gathered, nothing is loaded
    path = Path(path)
    config, recipe = _quantization_config(path), checked_recipe(recipe, "load_quantized")
    _check_weights(weights, skip, config)
    if weights is None:
        for stored, own, names in _read_codes(model, path, config, recipe):
            convert(model, own, only=names, weights=stored)  # type: ignore[arg-type]
        _record_reasons(model, {}, "the checkpoint has it in high precision")
        return model
    if recipe is None:
        recipe = Float8CurrentScaling() if weights in ("stored", "nvfp4") else Float8BlockScaling()
    receipt = convert(model, recipe, skip=skip, dry_run=True)
    made = _quantize_while_reading(model, path, recipe, weights, receipt)
    convert(model, recipe, only=made, weights=weights)
    reasons = {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}
    _record_reasons(model, reasons, "its weights are not stored quantized")
    return model


def _record_reasons(model: nn.Module, reasons: dict[str, str], default: str) -> None:
    """Record why layers stayed, by the names of their weights; ``convert`` knows only that it was given others."""
    for one in decisions_so_far(model):
        if one.decision == "kept" and one.reason == NOT_IN_ONLY:
            name = weight_name(one.found, one.found.weights[0])
            record_reason(one.found.module, reasons.get(name, default))


def _check_weights(weights: Any, skip: Any, config: Any) -> None:
    ways = ("stored", *DECODED)
    if weights is not None:
        check_weights(weights, ways)
    if config is not None and not (weights is None and skip is None):
        raise ValueError(
            f"weights={shown(weights)} and skip={shown(skip)} are for checkpoints in high precision, and this one "
            "has a quantization_config; leave them out"
        )
    if config is None and weights is None:
        raise ValueError(
            "the checkpoint's quantization_config is None: it is in high precision; pass weights='nvfp4', 'mxfp4', "
            "'mxfp6', 'mxfp8', 'fp8-channel' or 'stored' to quantize its weights while they are read"
        )


def _quantization_config(path: Path) -> Any:
    """Return what the checkpoint says about its quantization, None if nothing; ModelOpt has a file for it."""
    config = _json_object(path / "config.json", LARGEST_CONFIG).get("quantization_config")
    if config is None and (path / MODELOPT).exists():
        config = _json_object(path / MODELOPT, LARGEST_CONFIG).get("quantization")
        return {**config, "quant_method": "modelopt"} if isinstance(config, dict) else repr(config)
    return config


def _read_codes(
    model: nn.Module, path: Path, config: Any, recipe: Recipe | None
) -> list[tuple[str, Recipe, list[str]]]:
    """Load a quantized checkpoint; return how weights are stored, and the recipe and names of their layers."""
    formats = read_formats(config)
    state = model.state_dict(keep_vars=True)
    names = CheckpointNames(model, state)
    tensors = without_inputs(names.in_model(_tensors(path), state), formats, state)
    keys = keys_of(tensors, formats)
    if not keys:
        elements = " (E4M3)" if formats[0].dtype == torch.float8_e4m3fn else ""
        raise ValueError(
            f"{path} has no weight in {formats[0].name}{elements}, though its quantization_config says so"
        )
    modules, linears, experts = dict(model.named_modules()), _linears(model), _experts(model, names)
    in_stacks = {key for stack in experts for key in stack.keys}
    of_experts: dict[str, _Coded] = {}
    made: dict[str, Any] = {}
    layers: dict[tuple[str, Recipe], list[str]] = {}
    for key in keys:
        fmt = format_of(key, tensors, formats)
        found = fmt.take(key, tensors, path)
        own = recipe or fmt.recipe()
        if key in in_stacks:
            of_experts[key] = _Coded(fmt, found, own)
            continue
        module = _linear_of(modules, linears, key, fmt.shape_of(found[fmt.codes]), fmt.name)
        shape = (module.weight.shape[0], module.weight.shape[1])
        made[key] = fmt.assemble(key, found, shape, module.weight.dtype, own)
        layers.setdefault((fmt.weights, own), []).append(key.removesuffix(".weight"))
    decoded = []
    for name, stacks in _by_module(experts).items():
        coded = [key for stack in stacks for key in stack.keys if key in of_experts]
        if not coded:
            continue
        made_of_experts = _assembled(stacks, of_experts, state)
        made |= made_of_experts
        for stack in () if made_of_experts else stacks:
            for key in of_experts.keys() & stack.keys:
                fmt, found, _ = of_experts[key]
                tensors[key] = fmt.decode(key, found, state[stack.key].dtype)
                decoded.append(stack.key)
        fmt, _, own = of_experts[coded[0]]
        layers.setdefault((fmt.weights if made_of_experts else "plain", own), []).append(name)
    _check_tensors(model, tensors, [*made], experts)
    for key, weight in made.items():
        weight = weight.to(_device_of(state[key]))
        _put(model, key, nn.Parameter(weight, requires_grad=False))
    for key, value in _one_by_one(tensors, experts):
        _put(model, key, value)
    for key in decoded:
        model.get_parameter(key).requires_grad_(False)
    return [(weights, own, names) for (weights, own), names in layers.items()]


class _Experts(NamedTuple):
    """Experts that are stacked in the parameter ``key`` (E, N, K), and their names one by one: the parts of each.

    ``transposed``: the parameter is (E, K, N).
    """

    key: str
    names: list[list[str]]
    transposed: bool

    @property
    def keys(self) -> list[str]:
        """The names of its tensors in a checkpoint, stacked or one by one."""
        return [self.key, *(name for own in self.names for name in own)]

    def join(self, tensors: dict[str, Tensor]) -> None:
        """Stack the experts if they are there one by one.

        Raises:
            RuntimeError: some are not.
        """
        needed = [name for own in self.names for name in own]
        if not any(name in tensors for name in needed):
            return
        missing = [name for name in needed if name not in tensors]
        if missing:
            raise RuntimeError(
                f"the checkpoint lacks {some(missing)} of {shown(self.key)}; copy it again, with all of its files"
            )
        stacked = torch.stack([torch.cat([tensors.pop(name) for name in own]) for own in self.names])
        tensors[self.key] = stacked.transpose(1, 2).contiguous() if self.transposed else stacked


class _Coded(NamedTuple):
    """A quantized weight of a checkpoint: its layout, its tensors, the recipe of its layer."""

    format: ReadFormat
    found: dict[str, Tensor]
    recipe: Recipe


def _by_module(experts: list[_Experts]) -> dict[str, list[_Experts]]:
    """Return the stacks of each module of experts, by its name."""
    found: dict[str, list[_Experts]] = {}
    for stack in experts:
        found.setdefault(stack.key.rpartition(".")[0], []).append(stack)
    return found


def _assembled(
    stacks: list[_Experts], coded: dict[str, _Coded], state: dict[str, Any]
) -> dict[str, GroupedTensor]:
    """Return the quantized parameters of a module of experts by name; none where one cannot be kept as codes."""
    made: dict[str, GroupedTensor] = {}
    fmt, _, recipe = next(coded[key] for stack in stacks for key in stack.keys if key in coded)
    for stack in stacks:
        dtype, experts = state[stack.key].dtype, _matrices(stack, coded)
        own = [coded[key] for key in stack.keys if key in coded]
        alike = all(one.format == fmt and one.recipe == recipe for one in own)
        if not experts or not alike:
            return {}
        members = [
            fmt.assemble(stack.key, one, fmt.shape_of(one[fmt.codes]), dtype, recipe, "grouped_linear")
            for one in experts
        ]
        storage = join_members(members, dtype)
        storage.transposed = stack.transposed
        made[stack.key] = GroupedTensor(storage)
        if made[stack.key].shape != state[stack.key].shape:
            return {}  # decoded, the whole tells its shape
    return made


def _matrices(stack: _Experts, coded: dict[str, _Coded]) -> list[dict[str, Tensor]]:
    """Return the tensors of each expert's matrix; none where some are missing, or a matrix has no scales of its own."""
    if stack.key in coded:
        fmt, found, _ = coded[stack.key]
        return fmt.experts(found, stack.transposed)
    if not all(name in coded for own in stack.names for name in own):
        return []
    whole = [coded[own[0]].format.join([coded[name].found for name in own]) for own in stack.names]
    return [] if None in whole else whole  # type: ignore[return-value]


def _experts(model: nn.Module, names: CheckpointNames) -> list[_Experts]:
    found = []
    for one in gemm_modules(model):
        if one.layer is None or not issubclass(one.layer, StackedExpertsLayer):
            continue
        stack = one.layer.stack_of(one.module)
        for weight in stack.weights:
            key = f"{one.name}.{weight}".lstrip(".")
            named = names.of_experts(key, int(one.module.num_experts), stack.every)  # type: ignore[arg-type]
            found.append(_Experts(key, named or [], stack.transposed))
    return found


def _quantize_while_reading(
    model: nn.Module, path: Path, recipe: Recipe, weights: str, receipt: Receipt
) -> list[str]:
    """Load a checkpoint in high precision, the weights that ``convert`` would store quantized one by one; return names
    of their modules.

    Args:
        receipt: of a dry run of ``convert``.
    """
    uses, chosen = uses_of_parameters(model), []
    converted = {one.name for one in receipt.gemms if one.decision == "converted"}
    quantizers: dict[str, Quantizer] = {}
    for one in gemm_modules(model):
        keys = {weight_name(one, weight): f"{one.name}.{weight.name}".lstrip(".") for weight in one.weights}
        plain = not isinstance(one.module, RecipeOwner) and stores(one.layer, one.module)
        held = any(why_not_stored(weight.tensor, uses, meta=True) for weight in one.weights)
        if not plain or held or one.reason or not converted.issuperset(keys):
            continue
        kind = one.layer._module_type  # type: ignore[union-attr]
        quantizers |= {key: stored_quantizer(recipe, name, weights, kind) for name, key in keys.items()}
        chosen.append(one.name)
    if not chosen:
        ours = [name for name, module in model.named_modules() if isinstance(module, Linear)]
        plain = any(type(module) is nn.Linear for module in model.modules())
        raise _is_ours(ours[0]) if ours and not plain else nothing_to_store(weights)
    state = model.state_dict(keep_vars=True)
    names = CheckpointNames(model, state)
    tensors, experts = names.in_model(_tensors(path), state), _experts(model, names)
    _check_tensors(model, tensors, [], experts)
    transposed = {stack.key for stack in experts if stack.transposed}
    for key, value in _one_by_one(tensors, experts):
        if key not in quantizers:
            _put(model, key, value)
            continue
        weight = state[key]
        value = value.to(_device_of(weight), weight.dtype)
        _put(model, key, stored_copy(value, quantizers[key], key in transposed))
    return chosen


def _json_object(file: Path, at_most: int) -> dict[str, Any]:
    """
    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        ValueError: it is no file, too large, or no JSON object.
    """
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise type(error)(_why_missing(file)) from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > at_most:
        raise ValueError(
            f"{file} is no file of at most {at_most} bytes; {file.name} of a checkpoint is small JSON"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is a JSON {type(content).__name__}; it must be an object")
    return content


def _why_missing(file: Path) -> str:
    """Return why a checkpoint has no file, and what to do."""
    folder = file.parent
    if folder.is_file():
        return f"{folder} is a file; give its folder, {folder.parent}"
    if not folder.is_dir() and len(folder.parts) == 2 and not folder.parent.is_dir():
        name = shown(str(folder))
        return f"{folder} is no folder; of a model on the Hub give huggingface_hub.snapshot_download({name})"
    if not folder.is_dir():
        return f"{folder} is no folder; give the folder that nc.export, or save_pretrained of Transformers, wrote"
    names = sorted(one.name for one in folder.iterdir())
    if not names:
        return f"{folder} is empty; give the folder that nc.export, or save_pretrained of Transformers, wrote"
    endings = {Path(name).suffix for name in names}
    if ".safetensors" not in endings and endings & _PICKLES:
        return (
            f"{folder} has {some(names)} and no safetensors file, which load_quantized reads; load these weights by "
            "model.load_state_dict(torch.load(file, weights_only=True))"
        )
    return (
        f"{folder} has {some(names)} and no {file.name}, which says how weights are quantized; put it beside them, or "
        "load weights without one by model.load_state_dict(safetensors.torch.load_file(file))"
    )


def only_pickles(folder: Path) -> str:
    """Return, of a folder whose weights are pickled files alone, what to do; nothing of other folders."""
    names = sorted(one.name for one in folder.iterdir() if one.suffix in _PICKLES)
    if not names or any(folder.glob("*.safetensors")):
        return ""
    return (
        f"{folder} has {some(names)} and no safetensors file; for each file run "
        "safetensors.torch.save_file(torch.load(file, weights_only=True), file.with_suffix('.safetensors'))"
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
        if told := only_pickles(path):
            raise FileNotFoundError(told)
        raise FileNotFoundError(
            f"{path} has no safetensors files; give the folder that nc.export, or save_pretrained of Transformers, "
            "wrote"
        )
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{path} has no {file.name}, which {INDEX} names; copy the checkpoint again"
            )
        try:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                for name in sorted(names):
                    if named is not None and named.get(name) != file.name:
                        continue  # a stale copy: the index says where a tensor is
                    if name in places:
                        raise ValueError(
                            f"{path} has {shown(name)} in {places[name]} and in {file.name}, and no {INDEX} says "
                            "which; remove the file that does not belong to the checkpoint"
                        )
                    tensors[name], places[name] = opened.get_tensor(name), file.name
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error
    lost = sorted(set(named or ()) - set(tensors))
    if lost:
        raise ValueError(
            f"{INDEX} of {path} names {shown(lost[0])}, which {(named or {})[lost[0]]} does not have"
        )
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
                f"{path / INDEX} has {shown(name)} in {shown(file)}, which is no safetensors file beside it"
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


_SIZES = "make the model with the sizes in the checkpoint's config.json"


def _is_ours(name: str) -> ValueError:
    """Return the error of a layer that was converted or loaded before."""
    return ValueError(
        f"{shown(name or 'the model')} is a layer of narrowcast already, and load_quantized makes it of a plain "
        "nn.Linear; give the model before it is converted or loaded, or call narrowcast.revert(model) first"
    )


def _linear_of(
    modules: dict[str, nn.Module],
    linears: dict[str, tuple[nn.Module, str]],
    key: str,
    shape: tuple[int, int],
    format: str,
) -> nn.Linear:
    """Return the layer that a quantized weight of this shape belongs to.

    Raises:
        ValueError: it is no ``nn.Linear`` that can be converted, or has a weight of another shape.
    """
    name = key.removesuffix(".weight")
    if name not in modules:
        raise ValueError(
            f"{shown(key)} is in {format}, and the model has no module {shown(name)}; it has {some([*linears])}. Give "
            "the model that the checkpoint is of"
        )
    module, reason = linears.get(name, (modules[name], ""))
    if isinstance(module, RecipeOwner):
        raise _is_ours(name)
    if type(module) is not nn.Linear or not key.endswith("weight"):
        raise ValueError(
            f"{shown(key)} is in {format}, and {shown(name)} of the model is {type(module).__name__}, not nn.Linear; "
            "the model has another architecture than the checkpoint's; give the one that the checkpoint is of"
        )
    if reason:
        raise ValueError(
            f"{shown(key)} is in {format}, and {shown(name)} of the model cannot be converted: {reason}"
        )
    if module.weight.shape != shape:
        raise ValueError(
            f"{shown(key)} is {shape} in the checkpoint, {tuple(module.weight.shape)} in the model; {_SIZES}"
        )
    return module


def _one_by_one(tensors: dict[str, Tensor], experts: list[_Experts]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by the model's names, stacked experts first, each joined when it is asked for; they are let go."""
    for stack in experts:
        stack.join(tensors)
        if stack.key in tensors:
            yield stack.key, tensors.pop(stack.key)
    for key in list(tensors):
        yield key, tensors.pop(key)


def _check_tensors(
    model: nn.Module, tensors: dict[str, Tensor], weights: list[str], experts: list[_Experts]
) -> None:
    """Raises:
    RuntimeError: the model or the checkpoint has what the other has not; names of a tied parameter count as one. Or
    the checkpoint cannot have what is on the meta device.
    ValueError: tensors of another shape, or of a dtype whose values are codes, or that do not fit.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {key: value.to("meta") for key, value in tensors.items()}
    for stack in experts:
        stack.join(tensors)
    empty = [key for key, value in model.named_buffers() if value.is_meta and key not in state]
    if empty:
        raise RuntimeError(
            f"the buffers {some(empty)} are on the meta device, and no checkpoint holds what is not in the state "
            "dict; make the model with real buffers, as accelerate.init_empty_weights() and then model.tie_weights() do"
        )
    given = {id(state[key]) for key in (*tensors, *weights) if key in state}
    missing = [key for key, value in state.items() if id(value) not in given]
    unexpected = [key for key in tensors if key not in state]
    if missing or unexpected:
        told = [f"the checkpoint lacks {some(missing)} of the model"] if missing else []
        told += [f"the model has no {some(unexpected)}, which the checkpoint has"] if unexpected else []
        raise RuntimeError(f"{'; '.join(told)}; give the model that the checkpoint is of")
    for key, value in tensors.items():
        if value.shape != state[key].shape:
            raise ValueError(
                f"{shown(key)} is {tuple(value.shape)} in the checkpoint, {tuple(state[key].shape)} in the model; "
                f"{_SIZES}"
            )
        wanted = state[key].dtype
        if wanted in _HIGH_PRECISION:
            fits = value.dtype in _HIGH_PRECISION
        else:
            exact = not value.is_floating_point() and torch.can_cast(value.dtype, wanted)
            fits = value.dtype == wanted or (exact and value.dtype.itemsize <= wanted.itemsize)
        if not fits:
            raise ValueError(
                f"{shown(key)} is {value.dtype} in the checkpoint, {wanted} in the model; "
                "load_quantized reads quantized weights with their scales, and tensors in high precision"
            )


def _device_of(parameter: Tensor) -> torch.device:
    """Return where the values of a parameter go."""
    return torch.get_default_device() if parameter.is_meta else parameter.device


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
