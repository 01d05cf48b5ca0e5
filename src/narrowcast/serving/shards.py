"""Weights that ranks share: each quantizes what it has, and codes and scales are gathered.

FSDP2 shards the rows of a weight, and its forward multiplies by the quantization of the whole. A rank can quantize its
rows alone if it knows the amax of all that shares a scale with them. So ranks reduce one fp32 amax for each scale that
several of them share, and each quantizes its rows beside zeros and that amax, which gives the codes of the whole.

Tensor parallelism splits a layer: each rank multiplies by the quantization of its own part, which is served as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed.together import Together
from ..formats import cdiv, round_up
from ..functional.collectives import gather_rows, largest_of, registered_name, smallest_of
from ..layers import Stage
from ..layers.described import ParameterRecord, describe_parameters
from ..layers.tensor_parallel import Split
from ..quantizers import Operand, buffers_of
from ..reference.layout import bytes_of_rows
from ..tensors import grouped_storage_of
from ..upstream.c10d import group_named
from .formats import Packed, WeightFormat, is_codes, scale_extent


class Piece(NamedTuple):
    """Rows of a matrix, of which ranks may have shards.

    Attributes:
        own: this rank's shard: (n, K), values or codes.
        start: the first row of the piece in the matrix.
        rows: of the whole piece.
        coded: ``own`` is codes.
        over: the ranks that have shards; None if one has all.
        counts: rows of every rank's shard.
    """

    own: Any
    start: int
    rows: int
    coded: bool = False
    over: Split | None = None
    counts: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        """Where the ranks' shards begin and end in the matrix."""
        return [self.start + sum(self.counts[:i]) for i in range(len(self.counts) + 1)]

    @property
    def first(self) -> int:
        """The first row of this rank's shard in the matrix."""
        return self.ends[0 if self.over is None else self.over.rank]

    @property
    def values(self) -> Tensor:
        """This rank's shard in high precision."""
        return self.own.dequantize() if self.coded else self.own  # type: ignore[no-any-return]

    def stored_as(self, operand: Operand) -> list[Tensor] | None:
        """Return codes and scales of a shard that is stored as the operand is quantized; None of any other."""
        stored = buffers_of(self.own) if self.coded else None
        same = stored and stored.quantizer._format_layout() is operand.quantizer._format_layout()
        return stored.rowwise if stored and same else None

    @staticmethod
    def of(record: ParameterRecord, apart: Split | None, start: int, dtypes: dict[int, torch.dtype]) -> Piece:
        """Return the piece that a parameter is.

        Args:
            apart: a split of which each rank quantizes its part alone.
            start: the first row of the piece in the matrix.
        """
        over = _over(record, apart)
        rows = record.shape[0] // (apart.ranks if apart is not None and apart.dim == 0 else 1)
        counts = () if over is None else _chunks(rows, over.ranks)
        return Piece(_held(record, dtypes), start, rows, record.stored == "codes", over, counts)

    @staticmethod
    def of_member(
        record: ParameterRecord,
        apart: Split | None,
        index: int,
        transposed: bool,
        dtypes: dict[int, torch.dtype],
    ) -> Piece:
        """Return one matrix of a stacked parameter (G, N, K), which one rank has if ranks share the matrices."""
        own, over, coded = _held(record, dtypes), _over(record, apart), record.stored == "codes"
        rows, columns = own.shape[-2:] if not transposed else own.shape[:-3:-1]
        counts: tuple[int, ...] = ()
        if over is not None:
            members = _chunks(record.shape[0], over.ranks)
            owner = next(r for r in range(len(members)) if index < sum(members[: r + 1]))
            counts, index = (
                tuple(rows * (r == owner) for r in range(len(members))),
                index - sum(members[: over.rank]),
            )
            if over.rank != owner:
                return Piece(own.new_empty(0, columns), 0, rows, False, over, counts)
        if coded:
            member = grouped_storage_of(own).split_into_quantized_tensors()[index]
        else:
            member = own[index].t() if transposed else own[index]
        return Piece(member, 0, rows, coded, over, counts)


def _held(record: ParameterRecord, dtypes: dict[int, torch.dtype]) -> Any:
    """Return codes, or values in the dtype that they are multiplied in."""
    if record.stored == "codes":
        return record.held.detach()
    values = record.values()
    return values.to(dtypes.get(record.stored_id, values.dtype))


def _over(record: ParameterRecord, apart: Split | None) -> Split | None:
    """Return how ranks share a parameter that each of them multiplies by as a whole; None if they do not."""
    over = [split for split in record.splits if split.dim is not None and split != apart]
    if len(over) > 1 or any(split.dim != 0 for split in over):
        raise ValueError(
            f"{record.name} is sharded along dims {[split.dim for split in over]}; shard weights along dim 0 of one "
            "mesh dim, as fully_shard does"
        )
    return over[0] if over else None


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups that share parameters of a model, each once, in the order of the parameters."""
    found: dict[str, Any] = {}
    for record in describe_parameters(model).values():
        if record.mesh is not None:
            dims = [dim for dim in range(record.mesh.ndim) if record.mesh.size(dim) > 1]
            found |= {record.mesh.get_group(dim).group_name: record.mesh.get_group(dim) for dim in dims}
        names = [registered_name(split.group) for split in record.splits]
        found |= {name: group_named(name) for name in names if name not in found}
    return list(found.values())


def split_of(layer: Any, stage: Stage, record: ParameterRecord) -> Split | None:
    """Return how ranks split a weight of which each multiplies by its part alone: a matrix, or the matrices of experts.

    Raises:
        ValueError: the layer has several matrices or parts, whose order in the ranks' parts is not known.
    """
    parallel = layer._split_over(stage.prefix)
    group = None if parallel is None else registered_name(parallel.group)
    for split in record.splits:
        if parallel is not None and registered_name(split.group) == group:
            if not layer._placed and (len(layer._stages) > 1 or layer._parts):
                raise ValueError(
                    f"{type(layer).__name__} is split over tp_size={layer.tp_size} processes, and the order of its "
                    "parts in the whole weight is not known; split nc.Linear and nc.LayerNormLinear without "
                    "parameters_split"
                )
            return split
        if len(record.shape) == 3 and split.dim == 0 and layer._groups * split.ranks == record.shape[0]:
            return split
    return None


def quantize_pieces(
    pieces: list[Piece],
    operand: Operand,
    written_as: WeightFormat,
    together: Together,
) -> list[Packed]:
    """Return the pieces of a matrix, quantized as the whole is, each without the rows of other ranks.

    Args:
        together: the processes that go on only together.
    """

    def pack(buffers: list[Tensor], like: Any) -> Packed:
        return written_as.pack(buffers, tuple(like.shape), operand.quantizer)

    with together.step():
        made = [piece.stored_as(operand) for piece in pieces]
        if all(buffers is not None for buffers in made):
            return [pack(buffers or [], piece.own) for buffers, piece in zip(made, pieces)]
        values = [piece.values for piece in pieces]
        if all(piece.over is None for piece in pieces):
            return [pack(operand.quantize(value).rowwise, value) for value in values]
        shared = _SharedAmax(pieces, values, operand)
    shared.reduce()
    with together.step():
        return [shared.packed(i, written_as) for i in range(len(pieces))]


class _SharedAmax:
    """The amax of what ranks share a scale for: of square tiles, and of the whole matrix.

    Args:
        pieces: of one matrix, sharded over the same ranks.
        values: this rank's rows of each.
        operand: how the matrix is quantized.
    """

    def __init__(self, pieces: list[Piece], values: list[Tensor], operand: Operand) -> None:
        self.pieces, self.values, self.operand = pieces, values, operand
        self.tile, of_matrix = scale_extent(operand.quantizer)
        rows, columns = self.tile
        total, device = sum(piece.rows for piece in pieces), values[0].device
        self.tiles = self.largest = None  # amax of every tile, and of the matrix
        if any(end % rows for piece in pieces for end in piece.ends if end != total):
            self.tiles = torch.zeros(
                cdiv(total, rows), cdiv(values[0].shape[1], columns), dtype=torch.float32, device=device
            )
            for piece, value in zip(pieces, values):
                if len(value):
                    top, tiles = self._spread(piece, value)
                    blocks = _magnitude(tiles).view(-1, rows, tiles.shape[1] // columns, columns)
                    own = self.tiles[top : top + len(blocks)]
                    torch.maximum(own, blocks.amax((1, 3)), out=own)
        if of_matrix:
            each = [_magnitude(value).amax().reshape(1) for value in values if value.numel()]
            self.largest = (
                torch.cat([*each, torch.zeros(1, dtype=torch.float32, device=device)]).amax().reshape(1)
            )

    def reduce(self) -> None:
        """Take the largest of all ranks."""
        group = next(piece.over.group for piece in self.pieces if piece.over is not None)
        self.tiles = None if self.tiles is None else largest_of(self.tiles, group)
        self.largest = None if self.largest is None else largest_of(self.largest, group)

    def _spread(self, piece: Piece, value: Tensor) -> tuple[int, Tensor]:
        """Return rows and columns filled up with zeros to whole tiles, and the first tile's index."""
        rows, columns = self.tile
        above = piece.first % rows
        out = value.new_zeros(round_up(above + len(value), rows), round_up(value.shape[1], columns))
        out[above : above + len(value), : value.shape[1]] = value
        return piece.first // rows, out

    def packed(self, index: int, written_as: WeightFormat) -> Packed:
        """Return this rank's rows of a piece, with the scales of the tiles that begin in them."""
        piece, value = self.pieces[index], self.values[index]
        (count, columns), (rows, per_tile), above = value.shape, self.tile, 0
        if self.tiles is not None and count:
            above = piece.first % rows
            top, value = self._spread(piece, value)
            # rows of other ranks in the first and the last tile are zeros, of which one row has the amax
            if above:
                value[0, ::per_tile] = self.tiles[top].to(value.dtype)
            if (above + count) % rows:
                value[-1, ::per_tile] = self.tiles[top + len(value) // rows - 1].to(value.dtype)
            value = value[:, :columns].contiguous()
        if self.largest is not None:
            value = torch.cat([value, value.new_zeros(rows, columns)])
            value[-1, 0] = self.largest.to(value.dtype)[0]
        elif not count:
            value = value.new_zeros(rows, columns)
        tensors = written_as.pack(
            self.operand.quantize(value).rowwise, (len(value), columns), self.operand.quantizer
        )
        granule = written_as.granule
        top = (piece.first - above) // granule
        begin, end = (cdiv(row, granule) - top for row in (piece.first, piece.first + count))
        return {
            suffix: tensor[above : above + count]
            if is_codes(suffix)
            else tensor[begin:end]
            if tensor.dim() > 1
            else tensor
            for suffix, tensor in tensors.items()
        }


def gather_piece(piece: Piece, own: Packed, written_as: WeightFormat) -> Packed:
    """Return a whole piece: the codes and scales of all ranks, one below the other."""
    if piece.over is None:
        return own
    tiles = [cdiv(row, written_as.granule) for row in piece.ends]
    scales = tuple(end - begin for begin, end in zip(tiles, tiles[1:]))
    return {
        suffix: _gather_rows(tensor, piece.counts if is_codes(suffix) else scales, piece.over.group)
        if tensor.dim() > 1
        else tensor
        for suffix, tensor in own.items()
    }


def gather_split(
    own: Packed, split: Split, dim: int, written_as: WeightFormat, shape: tuple[int, int], name: str
) -> Packed:
    """Return the matrix of a layer whose ranks each quantize a part of it.

    Args:
        dim: that is split.
        shape: (N, K) of the whole matrix.
        name: of the weight, for messages.
    Raises:
        ValueError: the format has one scale for what ranks scale by themselves.
    """
    extent = written_as.layout.scale_group[dim]
    if extent > 1 and shape[dim] // split.ranks % extent:
        raise ValueError(
            f"{name} is {shape} and split over {split.ranks} processes within blocks of {extent}, which each process "
            "scales by itself; split it at multiples of them"
        )
    whole = {}
    for suffix, tensor in own.items():
        if tensor.dim() < 2 or (extent == 0 and not is_codes(suffix)):
            if not torch.equal(smallest_of(tensor, split.group), largest_of(tensor, split.group)):
                raise ValueError(
                    f"{name} is split over {split.ranks} processes that each have a scale of their own, and the format "
                    "has one; use blocks: Float8BlockScaling or MXFP8BlockScaling"
                )
            whole[suffix] = tensor
            continue
        rows = tensor.t() if dim else tensor
        joined = _gather_rows(rows, (len(rows),) * split.ranks, split.group)
        whole[suffix] = joined.t() if dim else joined
    return whole


def sent(
    make: Callable[[], Iterator[tuple[str, Tensor]]],
    sender: int,
    group: Any,
    device: torch.device,
    together: Together,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that one rank of a group makes, on all of them.

    Args:
        make: of the sender's; others do not call theirs.
        sender: rank in the group.
        device: of the tensors.
    """
    own = dist.get_rank(group) == sender
    with together.step():
        made = list(make()) if own else []
    described: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in made]]
    dist.broadcast_object_list(described, group_src=sender, group=group)
    for i, (name, shape, dtype) in enumerate(described[0]):
        tensor = made[i][1].contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group_src=sender, group=group)
        yield name, tensor


def _gather_rows(own: Tensor, counts: tuple[int, ...], group: str | None) -> Tensor:
    """Gather rows of a matrix from ranks that have ``counts`` of them each, as bytes."""
    most, width = max(counts), own.shape[1] * own.itemsize
    sent = bytes_of_rows(own)
    if most == sum(counts):  # one rank has all rows
        whole = sent if len(own) else sent.new_empty(most, width)
        dist.broadcast(whole, group_src=counts.index(most), group=group_named(registered_name(group)))
        return whole.view(own.dtype)
    whole = gather_rows(F.pad(sent, (0, 0, 0, most - len(own))), group)
    if len(set(counts)) > 1:
        whole = torch.cat([rows[:count] for rows, count in zip(whole.split(most), counts)])
    return whole.view(own.dtype)


def _chunks(size: int, ranks: int) -> tuple[int, ...]:
    """Return how many rows each rank has of ``size``, as FSDP2 shards them."""
    each = cdiv(size, ranks)
    return tuple(max(min(size - rank * each, each), 0) for rank in range(ranks))


def _magnitude(value: Tensor) -> Tensor:
    """Return absolute values in fp32, 0 for NaN, which takes no part in an amax."""
    return value.float().abs().nan_to_num_(0.0, float("inf"))
