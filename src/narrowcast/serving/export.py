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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._checks import path as path_given
from ..convert.adapters import base_copy, has_adapters, merged_copy
from ..recipe import Recipe
from .formats import compressed_tensors_config, fine_grained_config
from .served import ExportedWeight, Served
from .weights import checked


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
    merge: Literal["kept", "new", "beside"] | None = None,
) -> Exported:
    """Write a model as safetensors with a ``quantization_config``, with the weights that the training GEMMs read.

    A model of Transformers also writes its own files (``config.json``, ``generation_config.json``). For other models
    ``config.json`` holds only the ``quantization_config``. A tied tensor is written once, under the name that
    Transformers keeps; in other models under its first name. Tied weights, transposed weights, and layers without a
    recipe stay in high precision; the config and the result list them. The tensors are those of
    :func:`narrowcast.serving.weights`.

    Args:
        path: a folder that does not exist yet, or is empty; it appears when it is complete.
        format: "hf-fp8-block128" (DeepSeek's), "compressed-tensors" (per tensor, 128 x 128, MXFP8, NVFP4 or MXFP4, by
            the recipe or as stored), "mxfp8", "nvfp4" or "mxfp4" (compressed-tensors of this format),
            "fp8-static" (delayed scaling, with the scales of inputs), or "bf16" (no quantization).
        recipe: a recipe or its name; overrides the recipes of layers that have one.
        dtype: of tensors in high precision; default: unchanged, bf16 for "bf16".
        merge: of a PEFT model with LoRA adapters: "kept" or "new" writes the model that
            :func:`narrowcast.merge_adapters` returns with these ``scales``; "beside" writes the base as it is, and the
            adapters as PEFT does, in the folder ``adapter``. The model stays as it is.

    Nothing is written if it raises.

    Raises:
        TypeError: ``merge`` is given for a model without adapters.
        ValueError: the format is unknown, cannot hold a recipe's weights, nothing can be quantized, or parameters are
            on the meta device; ``merge`` is unknown, or missing for a model with adapters.
        FileExistsError: ``path`` has files.
        ModuleNotFoundError: safetensors is not installed.
    """
    path_given("path", path)
    given, model = model, _without_adapters(model, merge)
    served, path = checked(model, format, recipe, dtype), Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not empty; give export a new folder")
    _safetensors()
    state = _unshared(served)
    config = None
    if served.kind.fine_grained:
        config = fine_grained_config(served.kept)
    elif served.kind.weights:
        config = compressed_tensors_config(served.modules, served.kept)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    exported = Exported(path, format, tuple(served.weights), size, served.plain_bytes())
    _write(model, path, state, served.aliases, config, given if merge == "beside" else None)
    return exported


def _without_adapters(model: Any, merge: str | None) -> Any:
    """Return the model to write, which shares its tensors with ``model``.

    Raises:
        TypeError, ValueError: as for :func:`export`.
    """
    if merge not in (None, "kept", "new", "beside"):
        raise ValueError(f"merge is {merge!r}; use 'kept', 'new' or 'beside'")
    if merge is None:
        if has_adapters(model):
            raise ValueError(
                "the model has adapters of PEFT; say with merge='kept', 'new' or 'beside' how to write them"
            )
        return model
    return base_copy(model) if merge == "beside" else merged_copy(model, merge)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("export writes safetensors; install it: pip install safetensors") from error
    return safetensors.torch


def _unshared(served: Served) -> dict[str, Tensor]:
    """Return the served tensors, those that share memory copied: safetensors writes none that do."""
    state: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in served:
        storage = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if tensor.numel() and storage in storages else tensor
        storages.add(storage)
    return state


def _write(
    model: Any,
    path: Path,
    state: dict[str, Tensor],
    aliases: dict[str, str],
    config: dict[str, Any] | None,
    adapters: Any,
) -> None:
    """Write a folder beside ``path`` and give it its name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        if hasattr(model, "save_pretrained"):
            # the names are the checkpoint's already
            model.save_pretrained(folder, state_dict=state, save_original_format=False)
        else:
            # as safetensors.torch.save_model tells which names it left out
            _safetensors().save_file(
                state, folder / "model.safetensors", metadata={"format": "pt", **aliases}
            )
        file = folder / "config.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        content.pop("quantization_config", None)
        if config is not None:
            content["quantization_config"] = config
        file.write_text(json.dumps(content, indent=2) + "\n")
        if adapters is not None:
            adapters.save_pretrained(folder / "adapter")
        folder.chmod(0o755)
        if path.exists():
            path.rmdir()
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
