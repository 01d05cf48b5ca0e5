"""``describe_parameter``: what a parameter is across ranks, in one record.

Checkpoints, serving, conversion, clipping and receipts read this record, and nothing else, to learn whether what a rank
holds is whole, a shard, a local expert, stored as codes, or gathered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import module as checked_module
from .._checks import shape_of, shown
from ..functional.collectives import gather_rows, group_size
from ..tensors import DequantizingTensor, local, spread_like
from ..upstream.fsdp import is_distributed, sharded_parameters
from ..upstream.modules import own_buffers, own_parameters
from .grouped_layer import GroupedLinearLayer
from .tensor_parallel import NO_GROUP, Split

_NO_LAYER = nn.Module()
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
        local_name: the same with experts under their number on this rank, as PyTorch's state dicts have it.
        layer: the module that has it, under ``attribute``.
        shape: of the whole.
        parts: the boxes of the whole that this rank holds; usually one, none if it holds nothing.
        splits: how ranks share it, outermost first.
        mesh: the DeviceMesh of a DTensor; None for other tensors.
        stored: "plain"; "codes", which count as their values; or "master", high precision that is gathered as codes.
        partial_gradient: its gradient is that of this rank's share of the rows (``sequence_parallel``): sum it over the
            ranks of the layer before a step.
        gathered: whether FSDP2 holds the whole at this time, and the module has that.
        parameter: what the optimizer has: the sharded one, also while FSDP2 holds the whole.
    """

    name: str
    local_name: str
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
    def stored_id(self) -> int:
        """The id of the tensor that the parameter stores on this rank, whatever is served in its place."""
        return id(local(self.parameter))

    @property
    def spread_over(self) -> int:
        """How many ranks hold one copy of it, or one of them for all; 1 if every rank has all of it."""
        return math.prod(split.ranks for split in self.splits)

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it, so that all ranks must agree."""
        return self.spread_over == 1

    @property
    def spread_out(self) -> bool:
        """Whether its tensor is other than the whole: a part, or a DTensor, also one that a rank has all of."""
        return bool(self.splits) or self.mesh is not None

    @property
    def declared(self) -> tuple[Split, ...]:
        """The splits of a dim that its layer declares; the tensor itself does not show them."""
        return tuple(split for split in self.splits if split.by != "mesh" and split.dim is not None)

    def values(self) -> Tensor:
        """Return what this rank holds in high precision; of plain and master weights the memory itself."""
        held = self.held.detach()
        if self.stored == "codes":
            return held.dequantize()
        return held._shard if self.stored == "master" else held

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shape of what this rank holds, as gradient and moments have."""
        return local(tensor).shape == self.held.shape

    def of(self, tensor: Tensor) -> ParameterRecord:
        """Return the record of another tensor that ranks share as they share the parameter: a gradient or a moment.

        Raises:
            ValueError: it has another shape, so that nothing says which part of it a rank holds.
        """
        if not self.fits(tensor):
            raise ValueError(
                f"a tensor of shape {shape_of(tensor)} belongs to {self.name}, of which this rank holds "
                f"{shape_of(self.held)} of {self.shape}; how ranks share it is not known"
            )
        tensor = tensor if is_distributed(tensor) else spread_like(tensor, self.parameter)
        if _placed(tensor) == _placed(self.parameter):
            return replace(self, stored=how_stored(tensor), parameter=tensor)
        others = tuple(split for split in self.splits if split.dim is None)
        spread = _spread(tensor, self.declared, others)
        return replace(self, **spread, stored=how_stored(tensor), parameter=tensor)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return the whole in high precision; all ranks that share it call this. Plain values may share memory."""
        values: Any = self.spread(self.values())
        if self.mesh is not None:
            values = values.full_tensor()
        for split in self.declared:
            blocks = split.blocks or (values.shape[split.dim],)
            dim: Any = split.dim
            rows = gather_rows(values.movedim(dim, 0), split.group)
            parts = [part.split(blocks) for part in rows.chunk(split.ranks)]
            values = torch.cat([block for same in zip(*parts) for block in same]).movedim(0, dim)
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
        raise ValueError(f"the model has no parameter {shown(name)}; pass a name of model.named_parameters()")
    return found


def describe_parameters(model: nn.Module, buffers: bool = False) -> dict[str, ParameterRecord]:
    """Return the record of every parameter by its name in this rank's model, tied ones under each of their names.

    Args:
        buffers: describe buffers, too.
    Raises:
        ValueError: the split of one is not known: its layer lacks the group of its ranks, FSDP1 has flattened it, other
            code marked it as split, or its DTensor is a sum that is still to be made.
    """
    checked_module("model", model)
    sharded = sharded_parameters(model)
    return {
        f"{path}.{attribute}" if path else attribute: _described(place, module, attribute, tensor, sharded)
        for path, place, module in places(model)
        for attribute, tensor in {
            **own_parameters(module),
            **(own_buffers(module) if buffers else {}),
        }.items()
        if tensor is not None
    }


def describe_tensor(tensor: Any) -> ParameterRecord:
    """Return the record of a tensor of which no layer says more: of a DTensor its shard, of another all of it."""
    return ParameterRecord(
        "", "", _NO_LAYER, "", **_spread(tensor, (), ()), stored=how_stored(tensor), partial_gradient=False,
        gathered=False, parameter=tensor,
    )  # fmt: skip


def how_stored(tensor: Any) -> str:
    """Return how a tensor, or this rank's part of it, is stored, as in :class:`ParameterRecord`."""
    held = local(tensor)
    if isinstance(held, DequantizingTensor):
        return "codes"
    return "master" if hasattr(held, "_shard") else "plain"


class Experts(NamedTuple):
    """The experts of a mixture that this rank holds, of all ``number`` that the ranks of ``group`` hold in order."""

    number: int
    group: str | None

    @property
    def ranks(self) -> int:
        """How many ranks hold the experts."""
        return group_size(self.group)

    @property
    def first(self) -> int:
        """The number of the first of them."""
        return self.split(0).rank * (self.number // self.ranks)

    def split(self, dim: int | None, blocks: tuple[int, ...] = ()) -> Split:
        """Return how the ranks share a dim that counts experts."""
        return Split(dim, self.group, self.ranks, "experts", blocks)


class Place(NamedTuple):
    """A module in the whole model: its name there and on this rank, and the experts that it is or is inside of.

    ``renamed``: the experts under whose number its name has.
    """

    name: str
    local_name: str
    experts: Experts | None
    renamed: Experts | None = None


def places(model: nn.Module) -> Iterator[tuple[str, Place, nn.Module]]:
    """Yield path, place in the whole model and module of all modules, shared ones at each of their paths."""
    places: dict[str, Place] = {}
    parents: dict[str, nn.Module] = {}
    flattens = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, flattens):
            raise ValueError(
                f"FSDP1 has flattened {path or 'the model'}; shard the model with torch.distributed.fsdp.fully_shard"
            )
        above, _, name = path.rpartition(".")
        place = Place("", "", None) if not path else _inside(places[above], parents[above], name)
        place = place._replace(experts=vars(module).get("_local_experts") or place.experts)
        places[path], parents[path] = place, module
        yield path, place, module


def _inside(place: Place, parent: nn.Module, name: str) -> Place:
    """Return the place of a module's child."""
    if name in _WRAPPERS or isinstance(parent, nn.parallel.DistributedDataParallel):
        return place
    own = name
    if place.experts is not None and isinstance(parent, nn.ModuleList):
        own, place = str(int(name) + place.experts.first), place._replace(experts=None, renamed=place.experts)
    return place._replace(
        name=f"{place.name}.{own}".lstrip("."), local_name=f"{place.local_name}.{name}".lstrip(".")
    )


def _described(
    place: Place, module: nn.Module, attribute: str, tensor: Any, sharded: dict[Any, Any]
) -> ParameterRecord:
    name, own = attribute, sharded.get((module, attribute), tensor)
    label = f"{place.name}.{attribute}".lstrip(".")
    _check_known(label, module, own)
    experts, splits = place.experts, [] if place.renamed is None else [place.renamed.split(None)]
    if experts is not None and isinstance(module, GroupedLinearLayer):
        kind = attribute.rstrip("0123456789")
        if attribute in module._state_names():  # slots of all groups for each kind of tensor
            groups = module.num_gemms
            splits.append(experts.split(own.dim() - 1, (groups,) * (own.shape[-1] // groups)))
        elif kind == attribute:  # one parameter of all groups
            splits.append(experts.split(0))
        else:
            name = f"{kind}{int(attribute.removeprefix(kind)) + experts.first}"
            splits.append(experts.split(None))
    splits_of = getattr(module, "_split_of", None)
    splits.append(None if splits_of is None else splits_of(attribute))  # type: ignore[arg-type]
    own_splits = [split for split in splits if split is not None and split.ranks > 1]
    if any(split.group == NO_GROUP for split in own_splits):
        raise ValueError(
            f"{label} is split over {own_splits[-1].ranks} ranks whose group is not known; give its layer "
            "tp_group=, or call set_tensor_parallel_group(group)"
        )
    declared = tuple(split for split in own_splits if split.dim is not None)
    others = tuple(split for split in own_splits if split.dim is None)
    return ParameterRecord(
        f"{place.name}.{name}".lstrip("."),
        f"{place.local_name}.{attribute}".lstrip("."),
        module,
        attribute,
        **_spread(own, declared, others),
        stored=how_stored(own),
        partial_gradient=_covers_rows(module, attribute, tensor),
        gathered=own is not tensor,
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


def _placed(tensor: Any) -> Any:
    """Return what tells how a tensor of some shape is spread, without what layers declare."""
    return (tensor.device_mesh, tensor.placements, tensor.shape) if is_distributed(tensor) else None


def _spread(tensor: Any, declared: tuple[Any, ...], others: tuple[Split, ...]) -> dict[str, Any]:
    """Return shape, parts, splits and mesh of a tensor, given the splits of its dims and others that were declared."""
    held, shape = local(tensor), list(tensor.shape)
    mesh = tensor.device_mesh if is_distributed(tensor) else None
    parts, splits = [Part((0,) * held.dim(), (0,) * held.dim(), tuple(held.shape))], others + declared
    if mesh is not None:
        pending = any(placement.is_partial() for placement in tensor.placements)  # a sum is still to be made
        chunks = [] if pending or mesh.get_coordinate() is None else tensor.__create_chunk_list__()
        parts = [Part((0,) * held.dim(), tuple(one.offsets), tuple(one.sizes)) for one in chunks]
        splits += tuple(
            Split(placement.dim, mesh.get_group(dim).group_name, mesh.size(dim), "mesh")
            for dim, placement in enumerate(tensor.placements)
            if not (placement.is_replicate() or placement.is_partial()) and mesh.size(dim) > 1
        )
    for split in declared:
        blocks = split.blocks or (shape[split.dim],)
        parts = [outer for part in parts for outer in _outer(part, split, blocks)]
        shape[split.dim] *= split.ranks
    parts = [part for part in parts if 0 not in part.shape]
    return {"shape": tuple(shape), "parts": tuple(parts), "splits": splits, "mesh": mesh}


def _outer(part: Part, split: Split, blocks: tuple[int, ...]) -> Iterator[Part]:
    """Yield a box in what a layer has as boxes in the whole: one for each block that it meets."""
    dim: Any = split.dim
    first = 0
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
