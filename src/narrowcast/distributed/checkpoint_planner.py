"""Planners of ``torch.distributed.checkpoint`` that write and read the parts of the parameters' records.

A rank writes its boxes of every value, at their offsets in the whole. What several ranks hold must be equal: each adds
a checksum to its plan, and the rank that joins the plans compares them before anything is written.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..layers.described import ParameterRecord, Part, describe_tensor, how_stored

_COLUMNS = 1023  # words; odd, so that a change of the signs of all words of a row changes its sum
_ROWS = 64  # of so many words fit into a core's cache
_SMALL = 2**16  # bytes
_NAMES_TOLD = 3
_ROOM = 130  # characters


class Refused(ValueError):
    """A checkpoint that would lose or mix what ranks hold."""


class SavePlanner(DefaultSavePlanner):
    """Writes parts of values, and refuses values of which ranks hold different copies.

    Args:
        records: of parameters and buffers, by name in the whole model.
        ranks: that save.
        broadcast: whether this rank writes a buffer that one rank gives the others before each forward, by name.
        digests: of values that are no tensors, by name, instead of a digest of what is written.
        delayed: names of delayed scaling's state.
    """

    def __init__(
        self,
        records: dict[str, ParameterRecord],
        ranks: int,
        broadcast: dict[str, bool],
        digests: dict[str, str],
        delayed: set[str],
    ) -> None:
        super().__init__()
        self._delayed = delayed
        self._records, self._ranks, self._broadcast, self._digests = records, ranks, broadcast, digests
        self._parts: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        digests: dict[int, Any] = {}  # of what ranks must agree on, by the number of the item
        for item in plan.items:
            value, path = self.state_dict[item.index.fqn], self.mappings[item.index.fqn]
            writes = self._broadcast.get(str(path[1])) if path[0] == "model" else None
            if writes is False:
                continue
            alone = self._ranks == 1 or bool(writes)
            if not isinstance(value, Tensor):
                if not alone:
                    digests[len(items)] = self._digests.get(item.index.fqn) or digest(value), False
                items.append(item)
                continue
            record = self._records.get(_name(path))
            # others are such as a number of steps: whole, and equal on all ranks
            if record is None or not record.fits(value):
                record = describe_tensor(value)
            else:
                record = record.of(value)
            alone = alone or self._ranks // record.spread_over <= 1
            for own, part in _items(item, record):
                if own is not item:
                    self._parts[own.index] = part
                if not alone:
                    digests[len(items)] = _checksum(part), _name(path) in self._delayed
                items.append(own)
        self.plan = dataclasses.replace(plan, items=items, planner_data=(plan.planner_data, digests))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        _check_equal([(plan.items, plan.planner_data[1]) for plan in all_plans])
        return super().create_global_plan(
            [dataclasses.replace(plan, planner_data=plan.planner_data[0]) for plan in all_plans]
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return super().lookup_object(index)
        held = self._parts.get(index)
        return super().lookup_object(index) if held is None else held


class LoadPlanner(DefaultLoadPlanner):
    """Reads parts of values, and refuses a checkpoint of which no rank reads a value.

    Args:
        records: as of :class:`SavePlanner`.
        whole: what the names of values begin with that must all be read.
        delayed: names of delayed scaling's state, which need not be.
    """

    def __init__(
        self, records: dict[str, ParameterRecord], whole: tuple[str, ...], delayed: set[str]
    ) -> None:
        super().__init__()
        self._records, self._whole, self._delayed = records, whole, delayed
        self._targets: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        there, whole, items = self.metadata.state_dict_metadata, {}, []
        self._check_fits(there)
        for name, value in self.state_dict.items():
            path = self.mappings[name]
            described = there.get(name)
            if not isinstance(value, Tensor) or not isinstance(described, TensorStorageMetadata):
                whole[name] = value
                continue
            record = self._records.get(_name(path))
            if record is None or not record.declared or not record.fits(value):
                whole[name] = value
                continue
            record = record.of(value)
            chunks = [_chunk(part) for part in record.parts]
            for part, chunk in zip(record.parts, chunks):
                self._targets[MetadataIndex(name, chunk.offsets)] = part.of(record.held)
            items += create_read_items_for_chunk_list(name, described, chunks)
        plan = create_default_local_load_plan(whole, self.metadata)
        self._plan = dataclasses.replace(plan, items=[*plan.items, *items])
        restarts = {f"model.{name}" for name in self._delayed}
        expected = (name for name in there if name.startswith(self._whole) and name not in restarts)
        left = dict.fromkeys(name for name in expected if name not in self.state_dict)
        return LoadPlan([], planner_data=left)  # no rank needs the items of another

    def _check_fits(self, there: Mapping[str, Any]) -> None:
        """Compare what is to be loaded with what the checkpoint has.

        Raises:
            Refused: it lacks a value, or has one of another shape.
        """
        lacking = [name for name in self.state_dict if name not in there]
        if lacking:
            left = [name for name in there if name not in self.state_dict]
            instead = f", and has {_told(left[:1])} instead" if left else ""
            remedy = "load into the model that was saved, under the same names"
            if all(name.startswith("optimizer.") for name in lacking):
                remedy = "load into the optimizer that was saved, or leave optimizer out"
            raise Refused(f"the checkpoint has no {_told(lacking)}{instead}; {remedy}")
        differ = []
        for name, value in self.state_dict.items():
            described = there[name]
            if not isinstance(value, Tensor) or not isinstance(described, TensorStorageMetadata):
                continue
            record = self._records.get(_name(self.mappings[name]))
            declared = record is not None and record.declared and record.fits(value)
            wanted = record.of(value).shape if record is not None and declared else tuple(value.shape)
            if tuple(described.size) != wanted:
                differ.append(f"{name} {tuple(described.size)}, not {wanted}")
        if differ:
            raise Refused(
                f"the checkpoint has other shapes than the model over all ranks: {_told(differ)}; make the model with "
                "the sizes that it was saved with"
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        first, *others = (plan.planner_data for plan in global_plan)
        left = [name for name in first if all(name in of_rank for of_rank in others)]
        if left:
            raise Refused(
                f"no rank's model has {_told(left)} of the checkpoint; load into the model that was saved, stages of a "
                "pipeline under the names of the whole model, or read a part with torch.distributed.checkpoint.load"
            )
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return self._plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        target = self._targets.get(index)
        return super().lookup_tensor(index) if target is None else target


def _name(path: tuple[Any, ...]) -> str:
    """Return the name of the parameter or buffer of a value, given its keys in the nested state.

    Args:
        path: such as ("model", "weight") or ("optimizer", "state", "weight", "exp_avg").
    """
    return str(path[1] if path[0] == "model" else path[2] if path[:2] == ("optimizer", "state") else None)


def _items(item: WriteItem, record: ParameterRecord) -> Iterator[tuple[WriteItem, Tensor]]:
    """Yield an item of a plan for each part of a value, with what is written; the item itself for all of the value."""
    held = record.held.detach()
    if not record.declared:
        yield item, held
        return
    for part in record.parts:
        chunk, own = _chunk(part), part.of(held)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(own), torch.Size(record.shape))
        index = MetadataIndex(item.index.fqn, chunk.offsets)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data), own


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape))


def _check_equal(plans: list[tuple[list[WriteItem], dict[int, Any]]]) -> None:
    """
    Raises:
        Refused: ranks hold different copies of a value.
    """
    seen: dict[tuple[Any, ...], Any] = {}
    differ: dict[str, bool] = {}
    for items, checksums in plans:
        for number, (found, delayed) in checksums.items():
            index, data = items[number].index, items[number].tensor_data
            about = (found, None if data is None else (data.size, data.properties.dtype))
            if seen.setdefault((index.fqn, index.offset), about) != about:
                differ[index.fqn] = delayed
    if differ:
        told, remedy = _told([*differ]), _remedy(*next(iter(differ.items())))
        raise Refused(f"ranks hold different copies of {told}, and a checkpoint keeps one: {remedy}")


def _remedy(name: str, delayed: bool) -> str:
    if name == "extra":
        return "give every rank the same extra, such as a list of each rank's values"
    if delayed:
        return "call nc.reduce_delayed_scaling(model) after the backward, or set_recipe(amax_group=...)"
    return (
        "declare experts with MoEDispatch.local_experts, give pipeline stages names of their own with nn.ModuleDict, "
        "or make the replicas equal"
    )


def _told(names: list[str]) -> str:
    """Return names for a message: the first few, as many as it has room for, and how many more."""
    first = names[:_NAMES_TOLD]
    while len(first) > 1 and len(", ".join(first)) > _ROOM:
        first.pop()
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory that the host reads, and too small to share the start of operators."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return plain and tensor.nbytes <= _SMALL


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """Return sums that tell a tensor's bytes and their places, as int64 on its device.

    Words are summed over the rows and the columns of a table: any change of three words or fewer changes a sum.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # words must be aligned
        flat = flat.clone()
    end = flat.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    table = flat[:end].view(torch.int64).view(-1, _COLUMNS)
    columns, rows = table.new_zeros(_COLUMNS), []
    for few in table.split(_ROWS if table.device.type == "cpu" else max(len(table), 1)):
        rows.append(few.sum(1))
        columns += few.sum(0)  # which are in the cache by now
    return torch.cat([columns, *rows, flat[end:].to(torch.int64)])


def _checksum(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bytes."""
    words = (tensor if _is_small(tensor) else _sums(tensor).cpu()).contiguous()
    return hashlib.sha256(ctypes.string_at(words.data_ptr(), words.nbytes)).digest()


def digest(value: Any) -> str:
    """Return a digest of a value that is no tensor; equal for equal values, however they are held."""
    made = hashlib.sha256()
    for part in _told_apart(value):
        made.update(repr(part).encode() + b"\0")
    return made.hexdigest()


def _told_apart(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield "dict", len(value)
        for key, one in value.items():
            yield key
            yield from _told_apart(one)
    elif isinstance(value, (list, tuple)):
        yield type(value).__name__, len(value)
        for one in value:
            yield from _told_apart(one)
    elif isinstance(value, Tensor):
        values = value.dequantize() if how_stored(value) == "codes" else value
        yield value.dtype, tuple(value.shape), _checksum(values)
    else:
        yield type(value).__name__, value
