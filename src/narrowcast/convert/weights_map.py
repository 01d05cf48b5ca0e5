"""``weights_map``: a model's weights outside of it, stored ones as codes, for accelerate's offloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .._checks import shown
from ..layers.described import describe_parameters
from ..upstream.fsdp import reshard


def weights_map(model: nn.Module, folder: str | Path | None = None) -> Mapping[str, Tensor]:
    """Return a model's parameters and buffers by name, those that are stored quantized as codes.

    It is the ``state_dict`` of ``accelerate.cpu_offload`` and ``accelerate.dispatch_model``, for models with weights
    that :func:`narrowcast.convert` or :func:`narrowcast.load_quantized` stored. A state dict has their decoded values,
    of which accelerate can make no codes again. ``accelerate.disk_offload`` takes no map: give ``cpu_offload`` one with
    a ``folder``.

    Args:
        model: before accelerate has offloaded it.
        folder: a folder that does not exist yet, or is empty: the tensors are written there as safetensors, and read
            when they are asked for. Without one they are held in the memory of the host, shared with the model's where
            that is there.

    Raises:
        TypeError: ``model`` is no module, or ``folder`` no path.
        ValueError: a parameter is on the meta device, sharded, or gathered as codes.
        FileExistsError: ``folder`` has files.
        ModuleNotFoundError: safetensors is not installed.
    """
    _checks.module("model", model)
    reshard(model)
    coded = set()
    for record in describe_parameters(model).values():
        if record.parameter.is_meta or record.spread_out or record.stored == "master":
            how = "on the meta device" if record.parameter.is_meta else "sharded"
            raise ValueError(
                f"parameter {shown(record.name)} is {how}; make the map of a whole model, before accelerate offloads it"
            )
        if record.stored == "codes":
            coded.add(id(record.parameter))
    held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    held |= dict(model.named_buffers(remove_duplicate=False))
    names = {name for name, tensor in held.items() if id(tensor) in coded}
    tensors = {name: tensor.detach().to("cpu") for name, tensor in held.items()}
    if folder is not None:
        _checks.path("folder", folder)
        return _OnDisk(tensors, names, Path(folder))
    for name in names:
        tensors[name]._keeps_codes = True
    return tensors


class _OnDisk(Mapping[str, Tensor]):
    """Tensors in files of a folder, one for each; ``coded``: names of those with codes and scales."""

    def __init__(self, tensors: dict[str, Any], coded: set[str], folder: Path) -> None:
        safetensors = _safetensors()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists and is not empty; give weights_map a new folder")
        self._files: dict[str, Path] = {}
        self._empty: dict[str, Any] = {}
        with _checks.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for index, (name, tensor) in enumerate(tensors.items()):
                buffers = {"": tensor}
                if name in coded:
                    buffers = {own: getattr(tensor, own) for own in tensor.__tensor_flatten__()[0]}
                    self._empty[name] = tensor.to("meta")
                self._files[name] = folder / f"{index}.safetensors"
                safetensors.torch.save_file(
                    {own: one.clone(memory_format=torch.contiguous_format) for own, one in buffers.items()},
                    self._files[name],
                )

    def __getitem__(self, name: str) -> Tensor:
        with _safetensors().safe_open(self._files[name], framework="pt") as file:
            if name not in self._empty:
                return file.get_tensor("")  # type: ignore[no-any-return]
            empty = self._empty[name]
            buffers = iter([file.get_tensor(own) for own in empty.__tensor_flatten__()[0]])
        made = empty._like(lambda _: next(buffers))
        made._keeps_codes = True
        return made  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "weights_map writes safetensors; install it: pip install safetensors"
        ) from error
    return safetensors
