"""Quantized tensors whose rows FSDP2 shards: each shard is codes and scales of whole blocks, and is gathered as such.

``fully_shard`` splits a parameter with operators that other code uses, too, so their handlers ask who calls them. The
shards that it makes are marked; what FSDP2 does to one later follows from the mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import a_kind
from ..formats import Buffer, Layout
from ..upstream.autograd import version_preserved
from ..upstream.fsdp import (
    current_sharding,
    is_distributed,
    local_part,
    sharding_caller,
)


class ShardedRows:
    """A quantized matrix sharded by rows: the part of ``QuantizedTensor`` that FSDP2 calls.

    A rank's shard has the buffers of its rows, in both directions where one does not follow from the other. A gather
    moves those that lie by rows; what all rows share, such as the amax of the matrix, every rank has.
    """

    _is_shard: bool = False
    """Whether FSDP2 made this, as this rank's part of a parameter."""

    _shards: Any = None
    """Group of all ranks whose shards share one scale; writes reduce the amax over it. None if each has its own."""

    def _mark_as(self, other: Any) -> None:
        """Become a shard if another tensor is one, with the same ranks."""
        if other._is_shard:
            self._is_shard, self._shards = True, other._shards

    def fsdp_pre_all_gather(
        self: Any, mesh: Any, orig_size: torch.Size, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, bool, list[Tensor]]]:
        """Return what this rank gives, the shape of the whole, whether its columns are to be made, and what it
        keeps.

        Args:
            mesh: the ranks; None if the caller gathers by itself, which then gets all that moves.
            orig_size: shape of the whole.
            module: that has the parameter.
            contiguous_orig_stride, mp_policy: not read.
        """
        # only modules of this library read column-wise data
        makes_columns = (
            self._turns() and hasattr(module, "_takes_rows") and not module._takes_rows(self._BARE_NAME)
        )
        given, moving = [], 0
        for buffer, held in _by_rows(self):
            along, _, entries, _ = _place(buffer, self.shape[0])
            moving += along >= 0
            given.append(
                held if along < 0 else held.narrow(along, 0, entries).contiguous()
            )  # without padding
        # with one rank, FSDP2 passes on only the first of several tensors
        moving = 1 if mesh is not None and mesh.size() == 1 else moving
        return tuple(given[:moving]), (orig_size, makes_columns, given[moving:])

    @torch.no_grad()
    def fsdp_post_all_gather(
        self: Any,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[torch.Size, bool, list[Tensor]],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return the whole tensor and the memory of it that FSDP2 frees; with ``out`` in that of the first time, and no
        memory.
        """
        shape, makes_columns, kept = metadata
        arrived = zip(_by_rows(self), [*all_gather_outputs, *kept], strict=True)
        values = {
            buffer.attribute: _whole(buffer, value, self.shape[0], tuple(shape))
            for (buffer, _), value in arrived
        }
        if out is None:  # this rank's own buffers, which it goes on writing to, are copied
            own = {id(value) for value in kept}
            values = {name: value.clone() if id(value) in own else value for name, value in values.items()}
        buffers = [values[buffer.attribute] for buffer, _ in _held(self)]
        whole = self._quantizer._assemble(buffers, tuple(shape), param_dtype)
        if makes_columns:
            whole.update_usage(columnwise_usage=True)
        # the gather writes FSDP2's memory; each later gather must fill all other buffers again
        memory = {id(value) for value in all_gather_outputs}
        if out is None:
            apart = [(buffer, held) for buffer, held in _held(whole) if id(held) not in memory]
            return whole, tuple(held for buffer, held in apart if _place(buffer, shape[0])[0] >= 0)
        first = local(out)
        pairs = [(getattr(first, buffer.attribute), held) for buffer, held in _held(whole)]
        to_fill = [
            (earlier, held)
            for earlier, held in pairs
            if id(held) not in memory or earlier.data_ptr() != held.data_ptr()
        ]
        overwrite_unseen([earlier for earlier, _ in to_fill], [held for _, held in to_fill])
        return out, ()

    def gathered_bytes(self: Any) -> int:
        """Return bytes that a gather of all shards moves, of this whole tensor."""
        places = [(held, _place(buffer, self.shape[0])) for buffer, held in _held(self._rows_alone())]
        return sum(held.narrow(along, 0, count).nbytes for held, (along, _, count, _) in places if along >= 0)

    def check_rows(self: Any, rows: int) -> None:
        """
        Raises:
            RuntimeError: the matrix has no equal shards of so many rows each, in whole blocks.
        """
        layout, block = self._quantizer._format_layout(), _block_rows(self._quantizer._format_layout())
        if self.dim() != 2 or not layout.joins[0]:
            reason = "its rows are not quantized apart from each other"
        elif not rows or self.shape[0] % rows or rows % block:
            reason = f"its {self.shape[0]} rows are not equal shards" + f" of whole {block}-row blocks" * (
                block > 1
            )
        else:
            return
        raise cannot_shard(self, reason)

    def _rows_alone(self: Any) -> Any:
        """Return the same tensor without the column-wise data, where those follow from the row-wise ones."""
        same = self._like(lambda buffer: buffer)
        same.update_usage(columnwise_usage=False if same._turns() else None)
        return same

    def _asked_for_shards(self) -> bool:
        """Return whether FSDP2 asks.

        Raises:
            RuntimeError: FSDP1 does.
        """
        caller = sharding_caller()
        if caller == "FSDP1":
            check_not_sharded(self)
        return caller == "FSDP2"

    def _shards_of(self: Any, rows: int) -> list[Any]:
        """Return the tensor in shards of ``rows`` rows each; they share its buffers."""
        self.check_rows(rows)
        alone = self._rows_alone()
        return [alone._part(0, first, rows) for first in range(0, self.shape[0], rows)]

    def _empty_shard(self: Any, size: Sequence[int]) -> Any:
        """Return an uninitialized shard, which FSDP2 fills; on the meta device, too."""
        ranks, group, shared_modules = current_sharding()
        if list(size) != [self.shape[0] // ranks, *self.shape[1:]]:
            raise cannot_shard(self, f"{list(size)} of its {list(self.shape)} is no equal share of rows")
        self.check_rows(size[0])
        for module in shared_modules if self._turns() else ():  # a gather tells only the first
            takes_rows: Any = getattr(module, "_takes_rows", None)
            if takes_rows is not None:
                takes_rows(self._BARE_NAME)
        quantizer = self._rows_alone()._quantizer
        shard = quantizer.make_empty(tuple(size), dtype=self.dtype, device=self.device)
        shard._is_shard = True
        # ranks agree on values common to all rows at every write to a shard
        if ranks > 1 and any(_place(buffer, size[0])[0] < 0 for buffer, _ in _held(shard)):
            shard._shards = group
        return shard


def local(tensor: Any) -> Any:
    """Return what this rank holds of a tensor: of a DTensor its part."""
    return local_part(tensor) if is_distributed(tensor) else tensor


def dequantized(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a quantized tensor, or of a DTensor of such shards, which then are spread as they are."""
    return spread_like(local(tensor).detach().dequantize(dtype=dtype), tensor)


def spread_like(own: Tensor, tensor: Any) -> Tensor:
    """Return what this rank holds of another tensor as a DTensor that is spread like ``tensor``, if that is one."""
    if not is_distributed(tensor):
        return own
    return torch.distributed.tensor.DTensor.from_local(  # type: ignore[attr-defined]  # there, as the other is
        own,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def overwrite_unseen(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Overwrite unseen by autograd: a backward that saved a scale must read that of the codes gathered last."""
    for buffer, value in zip(buffers, values, strict=True):
        with version_preserved([buffer]):
            buffer.copy_(value)


def cannot_shard(tensor: Any, reason: str) -> RuntimeError:
    """Return the error where a quantized tensor cannot be sharded."""
    apart = "convert with weights='plain', or "
    if tensor.dim() == 3:
        apart = (
            "convert experts with weights='plain', make a GroupedLinear with single_grouped_weight=False, or "
        )
    return RuntimeError(
        f"FSDP cannot shard {a_kind(tensor)}: {reason}; {apart}build the model without quantized_model_init "
        "and shard that, a recipe then quantizes the gathered weights"
    )


def check_not_sharded(tensor: Any) -> None:
    """Refuse FSDP, which would go on with plain values: to be called where it reads a parameter.

    Raises:
        RuntimeError: the caller is FSDP.
    """
    if sharding_caller():
        raise cannot_shard(tensor, "it would go on with plain values")


def _held(tensor: Any) -> list[tuple[Buffer, Tensor]]:
    layout = tensor._quantizer._format_layout()
    pairs = [(buffer, getattr(tensor, buffer.attribute)) for buffer in layout.buffers]
    return [(buffer, held) for buffer, held in pairs if held is not None]


def _by_rows(tensor: Any) -> list[tuple[Buffer, Tensor]]:
    """Return buffers and tensors that hold rows, then those that all rows share."""
    return sorted(_held(tensor), key=lambda pair: _place(pair[0], tensor.shape[0])[0] < 0)


def _place(buffer: Buffer, rows: int) -> tuple[int, int, int, int]:
    place = buffer.part(0, rows, False)
    assert place is not None  # rows begin at the first
    return place


def _block_rows(layout: Layout) -> int:
    """Return rows that must stay together in one shard, for either direction."""
    extents = [extent for buffer in layout.buffers for extent in buffer.shape if extent.size == "M"]
    return max((extent.group if extent.bits == 8 else extent.multiple for extent in extents), default=1)


def _whole(buffer: Buffer, gathered: Tensor, rows: int, shape: tuple[int, ...]) -> Tensor:
    """Return a buffer of the whole tensor from those of all shards, one below the other and without padding."""
    along, _, entries, _ = _place(buffer, rows)
    if along < 0:
        return gathered
    ranks = shape[0] // rows
    if along == 1 and ranks > 1:
        gathered = gathered.view(ranks, -1, entries).transpose(0, 1).reshape(-1, ranks * entries)
    missing = buffer.sizes(shape)[along] - gathered.shape[along]
    padding = (0, 0) * (gathered.dim() - 1 - along) + (0, missing)
    return F.pad(gathered, padding) if missing else gathered
