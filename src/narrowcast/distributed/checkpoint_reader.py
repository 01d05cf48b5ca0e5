"""Read checkpoints of ``torch.distributed.checkpoint`` without running anything that they name.

PyTorch's own reader unpickles ``.metadata``, and its planner every value that is not a tensor, so a stranger's
checkpoint runs code there. This reader knows the few classes of a ``.metadata`` by name and builds its description
from numbers and strings. Values go through ``torch.load(weights_only=True)``. Every size is checked before use.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._checks import shown

LARGEST_METADATA = 2**30  # bytes

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    # the path that it was saved to, which nothing reads
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class Extent(NamedTuple):
    """The place of a value: a file of the checkpoint, and the bytes in it."""

    file: str
    offset: int
    length: int


class SafeReader(StorageReader):
    """A ``StorageReader`` for folders that ``FileSystemWriter`` wrote.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path, self.metadata = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """
        Raises:
            ValueError: the description names anything but its own classes, or does not match the files.
        """
        if self.metadata is None:
            self.metadata = _checked(self.path)
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stored: dict[Any, Extent] = self.read_metadata().storage_data
        items: dict[str, list[tuple[Extent, ReadItem]]] = {}
        for item in plan.items:
            extent = stored[item.storage_index]
            items.setdefault(extent.file, []).append((extent, item))
        for name, of_file in items.items():
            with (self.path / name).open("rb") as file:
                for extent, item in of_file:
                    file.seek(extent.offset)
                    self._read(item, io.BytesIO(file.read(extent.length)), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, content: io.BytesIO, planner: LoadPlanner) -> None:
        name = item.dest_index.fqn
        value = plain_value(content, name)
        if item.type == LoadItemType.BYTE_IO:
            # The planner unpickles what it gets without limits: it gets what was made here, not bytes of the file.
            written = io.BytesIO()
            torch.save(value, written)
            written.seek(0)
            planner.load_bytes(item, written)
            return
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{shown(name)} of {self.path} is {type(value).__name__}; its .metadata says a tensor"
            )
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            value = value.narrow(dim, begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != value.shape:
            raise ValueError(
                f"{shown(name)} of {self.path} is {tuple(value.shape)} where {tuple(target.shape)} is read"
            )
        target.copy_(value)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


def load(
    state: dict[str, Any], reader: SafeReader, group: Any = None, planner: LoadPlanner | None = None
) -> None:
    """Load a checkpoint into a state dict, in place, as ``torch.distributed.checkpoint.load`` does."""
    dcp.load(
        state,
        storage_reader=reader,
        planner=planner,
        process_group=group,
        no_dist=not torch.distributed.is_initialized(),
    )


def plain_value(content: io.BytesIO, name: str) -> Any:
    """Return the value that ``torch.save`` wrote.

    Raises:
        ValueError: it is more than tensors, numbers, strings and containers of them.
    """
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = next(
            (line for line in str(error).splitlines() if "WeightsUnpickler error" in line), "it is damaged"
        )
        raise ValueError(
            f"{shown(name)} of the checkpoint holds more than tensors, numbers, strings and containers of them, and "
            f"reading it could run code ({why.strip()}); if you trust it, load it with torch.distributed.checkpoint "
            "and save plain values"
        ) from error


class _Record:
    """A stand-in for an object of a ``.metadata``: keeps its state, whatever it is made with."""

    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Names(pickle.Unpickler):
    """Reads the names of a ``.metadata``; nothing that it names is imported or called."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # classes of this load alone: a pickle can write to the attributes of what it names
        self.records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """
        Raises:
            pickle.UnpicklingError: no class of a ``.metadata``.
        """
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self.records.setdefault(name, type(name, (_Record,), {}))


def _checked(path: Path) -> Metadata:
    """Return the description of a checkpoint, with :class:`Extent` as the values of its ``storage_data``."""
    try:
        file = path / ".metadata"
        size = _size(file)
        if size > LARGEST_METADATA:
            raise ValueError(f".metadata has {size} bytes, more than the {LARGEST_METADATA} that are read")
        with file.open("rb") as opened:
            return _metadata(path, _Names(opened).load())
    except FileNotFoundError:
        raise
    except Exception as error:  # bytes of unknown content raise anything
        raise ValueError(
            f"{path} is not a checkpoint that load_checkpoint reads, which are those of save_checkpoint and of "
            f"torch.distributed.checkpoint's FileSystemWriter: {error}; if you trust it, load it with "
            "torch.distributed.checkpoint and save it again"
        ) from error


def _metadata(path: Path, read: Any) -> Metadata:
    fields = _fields(read, "Metadata")
    described = {
        _typed(name, str): _described(name, value)
        for name, value in _typed(fields["state_dict_metadata"], dict).items()
    }
    stored, sizes = {}, {}
    for key, value in _typed(fields["storage_data"], dict).items():
        extent = _extent(value)
        if extent.file not in sizes:
            sizes[extent.file] = _size(path / extent.file)
        if extent.offset + extent.length > sizes[extent.file]:
            raise ValueError(f"{extent.file} has {sizes[extent.file]} bytes, too few for {extent}")
        stored[_index(key)] = extent
    for name, value in described.items():
        _check_extents(name, value, stored)
    planner_data = {
        _typed(name, str): tuple(_part(part) for part in _typed(parts, tuple))
        for name, parts in _typed(fields.get("planner_data") or {}, dict).items()
    }
    return Metadata(described, planner_data, stored)


def _described(name: str, value: Any) -> Any:
    if type(value).__name__ == "BytesStorageMetadata" and isinstance(value, _Record):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    dtype = _typed(_record(fields["properties"], "TensorProperties").state, tuple)[0]
    chunks = []
    for chunk in _typed(fields["chunks"], list):
        parts = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size_of(parts["offsets"]), _size_of(parts["sizes"])))
    size = _size_of(fields["size"])
    inside = all(
        len(one.offsets) == len(one.sizes) == len(size)
        and all(begin + length <= whole for begin, length, whole in zip(one.offsets, one.sizes, size))
        for one in chunks
    )
    if not inside or sum(math.prod(one.sizes) for one in chunks) != math.prod(size):
        raise ValueError(f"the parts of {shown(name)} are not the tensor of shape {tuple(size)}")
    return TensorStorageMetadata(TensorProperties(dtype=_typed(dtype, torch.dtype)), size, chunks)


def _check_extents(name: str, value: Any, stored: dict[Any, Extent]) -> None:
    """Raise unless every part of a value is stored, in at least the bytes that it has."""
    if isinstance(value, BytesStorageMetadata):
        parts: Iterator[tuple[Any, int]] = iter([(MetadataIndex(name), 0)])
    else:
        itemsize = value.properties.dtype.itemsize
        parts = ((MetadataIndex(name, one.offsets), math.prod(one.sizes) * itemsize) for one in value.chunks)
    for index, size in parts:
        if index not in stored or stored[index].length < size:
            raise ValueError(f"{shown(name)} needs {size} bytes, and {stored.get(index)} is what there is")


def _extent(value: Any) -> Extent:
    fields = _fields(value, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError("its files are compressed or otherwise transformed")
    extent = Extent(
        _typed(fields["relative_path"], str), _typed(fields["offset"], int), _typed(fields["length"], int)
    )
    name = extent.file
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or ":" in name:
        raise ValueError(f"{shown(name)} is not the name of a file in it")
    if extent.offset < 0 or extent.length < 0:
        raise ValueError(f"{extent} is outside the file")
    return extent


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _size_of(offset),
        None if index is None else _typed(index, int),
    )


def _size(file: Path) -> int:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        raise ValueError(f"{file.name} is no file")
    return found.st_size


def _size_of(value: Any) -> torch.Size:
    sizes = [_typed(size, int) for size in _typed(value, tuple)]
    if any(size < 0 for size in sizes):
        raise ValueError(f"{value} is no size")
    return torch.Size(sizes)


def _part(value: Any) -> str | int:
    return value if type(value) is int else _typed(value, str)


def _record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"it has {type(value).__name__} where {name} belongs")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    return _typed(_record(value, name).state, dict)


def _typed(value: Any, cls: type) -> Any:
    if type(value) is not cls:
        raise ValueError(f"it has {type(value).__name__} where {cls.__name__} belongs")
    return value
