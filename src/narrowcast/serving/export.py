"""``export``: a checkpoint for servers, in the bits that the training GEMMs read.

What a layer multiplies by in training is its weight, quantized under its recipe. Those codes and scales are what is
written, so the served model is the one that was evaluated, and no quantization tool runs in between.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._checks import shown, some
from ..distributed.together import Together
from ..layers.described import describe_parameters
from ..recipe import Recipe
from ..tensors import plain
from .checkpoint_tensors import CheckpointTensors, ExportedWeight
from .formats import compressed_tensors_config, fine_grained_config
from .load import INDEX
from .weights import checked, together_of, without_adapters

FILE_BYTES = 5 * 10**9
"""Bytes of the tensors in one file, which are all made before they are written."""


@dataclass(frozen=True)
class Exported:
    """The result of :func:`export`, the same on every rank.

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
        reasons: dict[str, list[str]] = {}
        for one in self.weights:
            if one.reason:
                reasons.setdefault(one.reason, []).append(one.name)
        lines += [f"  in high precision: {some(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(lines)


def export(
    model: nn.Module,
    path: str | Path,
    format: str,
    *,
    recipe: Recipe | str | None = None,
    dtype: torch.dtype | None = None,
    merge: Literal["kept", "new", "beside"] | None = None,
) -> Exported:
    """Write a model as safetensors with a ``quantization_config``, with the weights that the training GEMMs read.

    A model of Transformers also writes its own files (``config.json``, ``generation_config.json``). For other models
    ``config.json`` holds only the ``quantization_config``. A tied tensor is written once, under the name that
    Transformers keeps; in other models under its first name. Tied weights, transposed weights, and layers without a
    recipe stay in high precision; the config and the result list them. The tensors are those of
    :func:`narrowcast.serving.weights`. More than 5 GB are several files with an index.

    All ranks that share the model's parameters call it. One of them writes, and an error on one ends the call on all.

    Args:
        path: a folder that does not exist yet, or is empty; it appears at once, when it is complete.
        format: one of the formats of :func:`narrowcast.serving.weights`.
        recipe: a recipe or its name; overrides the recipes of layers that have one.
        dtype: of tensors in high precision; default: unchanged, bf16 for "bf16".
        merge: of a PEFT model with LoRA adapters: "kept" or "new" writes the model that
            :func:`narrowcast.merge_adapters` returns with these ``scales``; "beside" writes the base as it is, and the
            adapters as PEFT does, in the folder ``adapter``. The model stays as it is.

    Nothing is written if it raises.

    Raises:
        TypeError: ``merge`` is given for a model without adapters.
        ValueError: the format is unknown, cannot hold a recipe's weights, nothing can be quantized, or parameters are
            on the meta device or hold NaN or infinity; ``dtype`` is not of high precision; ``merge`` is unknown,
            missing for a model with adapters, or "beside" where ranks share adapters.
        FileExistsError: ``path`` has files.
        ModuleNotFoundError: safetensors is not installed.
        RuntimeError: another rank raised one of these.
    """
    _checks.path("path", path)
    _checks.module("model", model)
    path, together = Path(path), together_of(model)
    with together.step():
        if together.first and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{path} exists and is not empty; give export a new folder")
        _safetensors()
        base, sums = without_adapters(model, merge)
        if merge == "beside":
            _check_adapters_are_whole(model, base)
        _check_finite(model)
        served = checked(base, format, recipe, dtype, together, sums)
    with _folder_for(path, together) as folder:
        size = _write_tensors(folder, served, together)
        with together.step():
            if folder is not None:
                _write_config(folder, base, served)
                if merge == "beside":
                    model.save_pretrained(folder / "adapter")  # type: ignore[operator]
    return Exported(path, format, tuple(served.weights), size, served.plain_bytes())


@torch.no_grad()
def _check_finite(model: nn.Module) -> None:
    for record in describe_parameters(model).values():
        values = plain(record.held)
        if values.is_meta or not values.is_floating_point():
            continue
        if not bool((values.float() if values.itemsize == 1 else values).isfinite().all()):
            raise ValueError(
                f"{shown(record.name)} holds NaN or infinity, which the server would answer with; export a checkpoint "
                "from before training diverged"
            )


def _check_adapters_are_whole(model: nn.Module, base: nn.Module) -> None:
    """
    Raises:
        ValueError: each rank holds a part of an adapter, which PEFT would write.
    """
    of_base = {id(parameter) for parameter in base.parameters()}
    for record in describe_parameters(model).values():
        if record.splits and id(record.parameter) not in of_base:
            raise ValueError(
                f"merge='beside' has PEFT write {record.name}, of which each rank holds a part; save with "
                "narrowcast.distributed.save_checkpoint, load in one process into a model that is not sharded, and "
                "export that, or use merge='kept'"
            )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("export writes safetensors; install it: pip install safetensors") from error
    return safetensors.torch


@contextmanager
def _folder_for(path: Path, together: Together) -> Iterator[Path | None]:
    """Yield a folder beside ``path`` that gets its name at the end, on the one rank that writes; None on others.

    Raises:
        FileExistsError: another process has written ``path`` meanwhile.
    """
    folder: Path | None = None
    try:
        with together.step(), _checks.writing(path):
            if together.first:
                path.parent.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        yield folder
        with together.step():
            if folder is not None:
                folder.chmod(0o755)
                for written in (*folder.rglob("*"), folder):
                    _force_to_disk(written)
                try:
                    folder.replace(path)
                except OSError as error:
                    if path.exists():
                        raise FileExistsError(
                            f"another process has written {path} meanwhile; where every rank has the whole model, call "
                            "export on one"
                        ) from error
                    raise
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tensors(folder: Path | None, served: CheckpointTensors, together: Together) -> int:
    """Write the tensors, and the index of several files; return their bytes."""
    # as safetensors.torch.save_model tells which names it left out
    metadata = {"format": "pt", **served.aliases}
    files: list[list[str]] = []
    total = 0
    for tensors in _in_files(served):
        total += sum(tensor.nbytes for tensor in tensors.values())
        files.append(list(tensors))
        with together.step():
            if folder is not None:
                _safetensors().save_file(_unshared(tensors), folder / f"{len(files)}.part", metadata)
    with together.step():
        if folder is not None:
            names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
            if len(files) == 1:
                names = ["model.safetensors"]
            for i, name in enumerate(names):
                (folder / f"{i + 1}.part").rename(folder / name)
            if len(files) > 1:
                weight_map = {key: name for keys, name in zip(files, names) for key in keys}
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _in_files(served: CheckpointTensors) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file, on the CPU."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in served:
        if tensors and size + tensor.nbytes > FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = tensor.cpu()
        size += tensor.nbytes
    yield tensors


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, those that share memory copied: safetensors writes none that do."""
    state: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if tensor.numel() and storage in storages else tensor
        storages.add(storage)
    return state


def _write_config(folder: Path, model: Any, served: CheckpointTensors) -> None:
    """Write what a model of Transformers says of itself, and how its weights are quantized."""
    if hasattr(model, "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        if model.is_remote_code():
            sys.modules["transformers.dynamic_module_utils"].custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content.pop("quantization_config", None)
    if served.kind.fine_grained:
        content["quantization_config"] = fine_grained_config(served.kept)
    elif served.kind.weights:
        content["quantization_config"] = compressed_tensors_config(served.modules, served.kept)
    file.write_text(json.dumps(content, indent=2) + "\n")
