"""``describe_parameter``: what a parameter is across ranks, in one record.

Checkpoints, serving, conversion, clipping and receipts read this record, and nothing else, to learn whether what a rank
holds is whole, a shard, a local expert, stored as codes, or gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import module as checked_module
from ..functional.collectives import gather_rows, group_size
from ..tensors import DequantizingTensor, local, spread_like
from ..upstream.fsdp import is_distributed, sharded_parameters
from ..upstream.modules import own_parameters
from .grouped_layer import GroupedLinearLayer
from .tensor_parallel import NO_GROUP, Split

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Part(NamedTuple):
    """A box of a parameter that this rank holds: its start in the rank's tensor, its offset in the whole, its shape."""

    start: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, held: Tensor) -> Tensor:
        """Return a view of the box in the rank's tensor."""
        for dim, (begin, length) in enumerate(zip(self.start, self.shape)):
            held = held.narrow(dim, begin, length)
        return held

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return a view of the box in the whole."""
        return Part(self.offset, self.offset, self.shape).of(whole)


@dataclass(frozen=True)
class ParameterRecord:
    """What a parameter is across ranks.

    Attributes:
        name: in the whole model: without wrappers, and experts under their number among all experts.
        layer: the module that has it, under ``attribute``.
        shape: of the whole.
        parts: the boxes of the whole that this rank holds; usually one, none if it holds nothing.
        splits: how ranks share it, outermost first; none if every rank has all of it, and all must be equal.
        mesh: the DeviceMesh of a DTensor; None for other tensors.
        stored: "plain"; "codes", which count as their values; or "master", high precision that is gathered as codes.
        partial_gradient: its gradient is that of this rank's share of the rows (``sequence_parallel``): sum it over the
            ranks of the layer before a step.
        gathered: whether FSDP2 holds the whole at this time, and the module has that.
        parameter: what the optimizer has: the sharded one, also while FSDP2 holds the whole.
    """

    name: str
    layer: nn.Module
    attribute: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    splits: tuple[Split, ...]
    mesh: Any
    stored: str
    partial_gradient: bool
    gathered: bool
    parameter: Any

    @property
    def held(self) -> Any:
        """What this rank stores: values, codes, or a master with the way it is gathered."""
        return local(self.parameter)

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it, so that all ranks must agree."""
        return not self.splits

    def values(self) -> Tensor:
        """Return what this rank holds in high precision; of plain and master weights the memory itself."""
        held = self.held.detach()
        if self.stored == "codes":
            return held.dequantize()
        return held._shard if self.stored == "master" else held

    def of(self, tensor: Tensor) -> ParameterRecord:
        """Return the record of another tensor that ranks share as they share the parameter: a gradient or a moment.

        Raises:
            ValueError: it has another shape, so that nothing says which part of it a rank holds.
        """
        if local(tensor).shape != self.held.shape or is_distributed(tensor) != is_distributed(self.parameter):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} belongs to {self.name}, of which this rank holds "
                f"{tuple(self.held.shape)} of {self.shape}; how ranks share it is not known"
            )
        declared = tuple(split for split in self.splits if split.by != "mesh")
        return replace(self, **_spread(tensor, declared), stored=_stored(local(tensor)), parameter=tensor)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return the whole in high precision; all ranks that share it call this. Plain values may share memory."""
        values: Any = self.spread(self.values())
        if self.mesh is not None:
            values = values.full_tensor()
        for split in self.splits:
            if split.by != "mesh":
                blocks = split.blocks or (values.shape[split.dim],)
                rows = gather_rows(values.movedim(split.dim, 0), split.group)
                parts = [part.split(blocks) for part in rows.chunk(split.ranks)]
                values = torch.cat([block for same in zip(*parts) for block in same]).movedim(0, split.dim)
        return values

    def spread(self, own: Tensor) -> Tensor:
        """Return this rank's tensor as one that is spread like the parameter: a DTensor if that is one."""
        return spread_like(own, self.parameter)


def describe_parameter(model: nn.Module, name: str) -> ParameterRecord:
    """Return what a parameter is across ranks; nothing is communicated.

    Args:
        name: as ``model.named_parameters()`` has it, or its name in the whole model.
    Raises:
        ValueError: there is no such parameter, or its split is not known.
    """
    records = describe_parameters(model)
    found = records.get(name) or next((one for one in records.values() if one.name == name), None)
    if found is None:
        raise ValueError(f"the model has no parameter {name!r}; pass a name of model.named_parameters()")
    return found


def describe_parameters(model: nn.Module) -> dict[str, ParameterRecord]:
    """Return the record of every parameter by its name in this rank's model, tied ones under each of their names.

    Raises:
        ValueError: the split of one is not known: its layer lacks the group of its ranks, FSDP1 has flattened it, other
            code marked it as split, or its DTensor is a sum that is still to be made.
    """
    checked_module("model", model)
    sharded = sharded_parameters(model)
    return {
        f"{path}.{attribute}" if path else attribute: _described(place, module, attribute, parameter, sharded)
        for path, place, module in _modules(model)
        for attribute, parameter in own_parameters(module).items()
        if parameter is not None
    }


class _Place(NamedTuple):
    """The name of a module in the whole model, and the experts of all ranks that it has a part of."""

    name: str
    experts: Experts | None


class Experts(NamedTuple):
    """The experts of a mixture that this rank holds, of all ``number`` that the ranks of ``group`` hold in order."""

    number: int
    group: str | None

    @property
    def local(self) -> int:
        """How many this rank holds."""
        return self.number // group_size(self.group)

    @property
    def first(self) -> int:
        """The number of the first of them."""
        return Split(0, self.group, group_size(self.group), "experts").rank * self.local


def _modules(model: nn.Module) -> Iterator[tuple[str, _Place, nn.Module]]:
    """Yield path, place in the whole model and module of all modules, shared ones at each of their paths."""
    places: dict[str, _Place] = {}
    parents: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        experts: Experts | None = vars(module).get("_local_experts")
        if not path:
            place = _Place("", experts)
        else:
            above, _, name = path.rpartition(".")
            parent = places[above]
            if isinstance(parents[above], nn.ModuleList) and parent.experts is not None:
                name, parent = str(int(name) + parent.experts.first), parent._replace(experts=None)
            wraps = name in _WRAPPERS or isinstance(parents[above], nn.parallel.DistributedDataParallel)
            place = _Place(
                parent.name if wraps else f"{parent.name}.{name}".lstrip("."), experts or parent.experts
            )
        places[path], parents[path] = place, module
        yield path, place, module


def _described(
    place: _Place, module: nn.Module, attribute: str, parameter: Any, sharded: dict[Any, Any]
) -> ParameterRecord:
    name, own = attribute, sharded.get((module, attribute), parameter)
    label = f"{place.name}.{attribute}".lstrip(".")
    _check_known(label, module, own)
    splits = []
    if place.experts is not None and isinstance(module, GroupedLinearLayer):
        kind = attribute.rstrip("0123456789")
        if kind == attribute:  # one parameter of all groups
            splits.append(Split(0, place.experts.group, group_size(place.experts.group), "experts"))
        else:
            name = f"{kind}{int(attribute.removeprefix(kind)) + place.experts.first}"
    splits_of = getattr(module, "_split_of", None)
    splits.append(None if splits_of is None else splits_of(attribute))
    declared = tuple(split for split in splits if split is not None and split.ranks > 1)
    if any(split.group == NO_GROUP for split in declared):
        raise ValueError(
            f"{label} is split over {declared[-1].ranks} ranks whose group is not known; give its layer tp_group=, or "
            "call set_tensor_parallel_group(group)"
        )
    return ParameterRecord(
        f"{place.name}.{name}".lstrip("."),
        module,
        attribute,
        **_spread(own, declared),
        stored=_stored(local(own)),
        partial_gradient=_covers_rows(module, attribute, parameter),
        gathered=own is not parameter,
        parameter=own,
    )


def _check_known(label: str, module: nn.Module, parameter: Any) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(parameter, getattr(fsdp, "FlatParameter", ())):
        raise ValueError(
            f"{label} is flattened by FSDP1; shard the model with torch.distributed.fsdp.fully_shard"
        )
    if is_distributed(parameter) and any(one.is_partial() for one in parameter.placements):
        raise ValueError(
            f"{label} is a DTensor placed as {parameter.placements}, a sum still to be made; reduce it"
        )
    marked = getattr(parameter, "tensor_model_parallel", False) and not hasattr(module, "_split_of")
    if marked and not is_distributed(parameter):
        raise ValueError(
            f"{label} is marked tensor_model_parallel by other code, which does not say among which ranks; make it a "
            "DTensor"
        )


def _covers_rows(module: Any, attribute: str, parameter: Any) -> bool:
    shares = getattr(module, "_shares_rows", False) and module._of_rows(attribute)
    return bool(shares or getattr(parameter, "sequence_parallel", False))


def _stored(held: Any) -> str:
    if isinstance(held, DequantizingTensor):
        return "codes"
    return "master" if hasattr(held, "_shard") else "plain"


def _spread(tensor: Any, declared: tuple[Split, ...]) -> dict[str, Any]:
    """Return shape, parts, splits and mesh of a tensor, given the splits that its layer declared."""
    held, shape = local(tensor), list(tensor.shape)
    mesh = tensor.device_mesh if is_distributed(tensor) else None
    parts, splits = [Part((0,) * held.dim(), (0,) * held.dim(), tuple(held.shape))], declared
    if mesh is not None:
        chunks = tensor.__create_chunk_list__() if mesh.get_coordinate() is not None else []
        parts = [Part((0,) * held.dim(), tuple(one.offsets), tuple(one.sizes)) for one in chunks]
        splits += tuple(
            Split(placement.dim, mesh.get_group(dim).group_name, mesh.size(dim), "mesh")
            for dim, placement in enumerate(tensor.placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        )
    for split in declared:
        blocks = split.blocks or (shape[split.dim],)
        parts = [outer for part in parts for outer in _outer(part, split, blocks)]
        shape[split.dim] *= split.ranks
    parts = [part for part in parts if 0 not in part.shape]
    return {"shape": tuple(shape), "parts": tuple(parts), "splits": splits, "mesh": mesh}


def _outer(part: Part, split: Split, blocks: tuple[int, ...]) -> Iterator[Part]:
    """Yield a box in what a layer has as boxes in the whole: one for each block that it meets."""
    dim, first = split.dim, 0
    begin, end = part.offset[dim], part.offset[dim] + part.shape[dim]
    for size in blocks:
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            offset = first * split.ranks + split.rank * size + low - first
            yield Part(
                _put(part.start, dim, part.start[dim] + low - begin),
                _put(part.offset, dim, offset),
                _put(part.shape, dim, high - low),
            )
        first += size


def _put(sizes: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
