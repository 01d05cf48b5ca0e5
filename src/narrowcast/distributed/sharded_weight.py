"""``ShardedWeight``: a shard of a weight in high precision that FSDP2 gathers quantized.

It lives in the sharded parameter, is what the optimizer updates, and has the two functions that ``fully_shard`` calls
around an all-gather. What a forward sees in its place is a quantized tensor of the whole weight.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..functional import grouped_quantize_weights, quantize_rounded
from ..quantizers import Quantizer
from ..state import starts_a_step
from ..tensors import GroupedTensor, GroupedTensorStorage, grouped_layout, local, overwrite_unseen
from ..upstream.tensors import make_wrapper, no_torch_function, schema_of

aten = torch.ops.aten

# What FSDP2, modules and checkpoints do to a parameter to get another. The results of all else are plain tensors, so
# that gradients and the optimizer's state are.
_STAYS_A_WEIGHT = {
    aten.detach.default,
    aten.alias.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.empty_like.default,
    aten.clone.default,
    aten._to_copy.default,
}


class WeightGather:
    """The gather of one weight: one object, which all shards of the weight share.

    Args:
        encoder: quantizes a shard row-wise; with a ``scale`` from outside where the whole tensor has one.
        quantizer: describes the gathered tensor.
        per_tensor: there is one scale or amax, fp32 (1,), which a forward of the model puts into ``scale``, and what
            the gathered tensor holds of it into ``kept``.
        members: matrices that are quantized each by itself, along the first dim; 0 for one matrix.
        backward_encoder: quantizes a shard column-wise, for a weight that the backward gathers in that direction; None
            where its layer makes the direction from the other.
    """

    def __init__(
        self,
        encoder: Quantizer,
        quantizer: Quantizer,
        per_tensor: bool,
        backward_encoder: Quantizer | None = None,
        members: int = 0,
    ) -> None:
        self.encoder, self.quantizer, self.per_tensor = encoder, quantizer, per_tensor
        self.backward_encoder, self.members = backward_encoder, members
        self.makes_columns = False  # transposes the gathered codes, for a layer whose backward does not
        self.scale: Tensor | None = None
        self.kept: Tensor | None = None
        self.written = False  # since the scale was taken
        self.columns_arrived = False  # the last gather was column-wise
        self.keeps = False  # keep this rank's sent codes from the current forward for its backward
        self.given: Any = None
        self.in_place: Any = None  # a ``GatherInPlace``

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return bytes that a gather moves: the codes, and the scales of blocks."""
        moved = [*self.encoder._describe_buffers(shape[-2:]).values()]
        moved = moved[:-1] if self.per_tensor else moved
        return max(self.members, 1) * sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in moved)

    def encode(self, shard: Tensor, dtype: torch.dtype, columnwise: bool) -> list[Tensor]:
        """Return codes of a shard (rows, K), scales of its blocks, and what all ranks have, fp32 (1,); in one
        direction.

        Args:
            dtype: of the model's computation, to which the shard is rounded first.

        Raises:
            RuntimeError: there is no scale of the weight as it is.
        """
        encoder = self.backward_encoder if columnwise else self.encoder
        assert encoder is not None
        if self.per_tensor and (self.scale is None or self.written):
            raise RuntimeError(
                "a sharded weight was written to, and has no scale yet: call the model that narrowcast was given to "
                "shard, not a part of it or unshard(); between microbatches without gradient sync weights must stay"
            )
        if self.members:
            layout = grouped_layout(encoder._storage_name)
            return grouped_quantize_weights([shard.to(dtype)], encoder, layout, None, None, None)
        buffers = quantize_rounded(shard, dtype, encoder, None, self.scale, None)
        # the last was made by the stream of the model, which is also where it is read
        return [*buffers[:-1], self.kept] if self.kept is not None else buffers

    def assemble(self, buffers: list[Tensor], shard: Any, dtype: torch.dtype) -> Tensor:
        """Return the quantized tensor around gathered buffers; ``shard``: shape of a shard."""
        if not self.members:
            return self.quantizer._assemble(buffers, (buffers[0].shape[0], shard[1]), dtype)
        quantizer: Any = self.quantizer
        return GroupedTensor(
            GroupedTensorStorage(
                buffers,
                quantizer=quantizer,
                storage_name=quantizer._storage_name,
                rowwise=True,
                columnwise=quantizer.columnwise_usage,
                num_tensors=self.members,
                logical_shape=(self.members, *shard[1:]),
                fake_dtype=dtype,
            )
        )


class ShardedWeight(Tensor):
    """A shard in high precision that is gathered quantized.

    Args:
        values: the shard, fp32 or bf16.
        gather: how its weight is gathered.
    """

    @staticmethod
    def __new__(cls, values: Tensor, gather: WeightGather) -> ShardedWeight:
        return make_wrapper(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor, gather: WeightGather) -> None:
        self._shard, self._gather = values, gather

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shard!r}, gathered with {self._gather.quantizer!r})"

    def __tensor_flatten__(self) -> tuple[list[str], WeightGather]:
        """Return name of the values and how they are gathered."""
        return ["_shard"], self._gather

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: WeightGather, outer_size: Any, outer_stride: Any
    ) -> ShardedWeight:
        """Rebuild from ``__tensor_flatten__``'s parts."""
        return ShardedWeight(inner_tensors["_shard"], context)

    @classmethod
    def __metadata_guard__(cls, guarded: WeightGather, given: WeightGather) -> bool:
        """Return whether code that was compiled for one weight serves another; what is guarded is a copy."""
        return (guarded.encoder, guarded.quantizer) == (given.encoder, given.quantizer)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights: list[ShardedWeight] = []
        plain = [_plain(argument, weights) for argument in args]
        result = func(*plain, **{name: _plain(value, weights) for name, value in (kwargs or {}).items()})
        if schema_of(func).is_mutable:  # in-place list operators return nothing
            given = {**dict(zip([a.name for a in schema_of(func).arguments], args)), **(kwargs or {})}
            for argument in schema_of(func).arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written: list[ShardedWeight] = []
                    _plain(given.get(argument.name), written)
                    for weight in written:
                        weight._gather.written = True
            return args[0] if schema_of(func).returns and isinstance(args[0], ShardedWeight) else result
        return ShardedWeight(result, weights[0]._gather) if func in _STAYS_A_WEIGHT else result

    @property
    def fsdp_pre_all_gather(self) -> _BeforeGather:
        """What FSDP2 calls for the codes of this shard."""
        return _BeforeGather(self)

    def _given(self, mesh: Any, mp_policy: Any) -> tuple[tuple[Tensor, ...], tuple[bool, list[Tensor]]]:
        gather, given_before = self._gather, self._gather.given
        in_backward = not starts_a_step()
        if in_backward:
            gather.given = None
        if in_backward and given_before is not None:  # quantized again it would be the same
            for buffer in given_before[0] if self._shard.is_cuda else ():
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
            return given_before
        columnwise = gather.backward_encoder is not None and in_backward
        buffers = gather.encode(self._shard, mp_policy.param_dtype or self._shard.dtype, columnwise)
        # with one rank, FSDP2 passes on only the first of several tensors
        given = 1 if mesh.size() == 1 else len(buffers) - gather.per_tensor
        result = tuple(buffers[:given]), (columnwise, buffers[given:])
        if gather.keeps and not in_backward:
            gather.given = result
        return result

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[bool, list[Tensor]],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the whole weight as a quantized tensor; with ``out`` in the one of the first time, whose codes are
        there.
        """
        (columnwise, kept), gather = metadata, self._gather
        gather.columns_arrived = columnwise
        if out is None:
            if gather.in_place is not None:
                gather.in_place.arrived(gather, all_gather_outputs[0])
            buffers = [*all_gather_outputs, *(tensor.clone() for tensor in kept)]
            others = [] if gather.backward_encoder is None else self._other_direction(buffers)
            assembled: Any = gather.assemble([*buffers, *others], self.shape, param_dtype)
            if gather.makes_columns:
                assembled.update_usage(columnwise_usage=True)
                others = assembled.columnwise_operand()[:2]
            return assembled, tuple(others)
        whole = [buffer for buffer in local(out).get_data_tensors() if buffer is not None]
        if gather.makes_columns:
            assembled = gather.assemble([*all_gather_outputs, *kept], self.shape, param_dtype)
            assembled.update_usage(columnwise_usage=True)
            pairs = [*zip(whole, assembled.get_data_tensors(), strict=True)]
            stale = [pair for pair in pairs if all(pair[1] is not output for output in all_gather_outputs)]
            overwrite_unseen([held for held, _ in stale], [fresh for _, fresh in stale])
        elif gather.backward_encoder is None:
            overwrite_unseen(whole[len(all_gather_outputs) :], kept)
        elif columnwise:
            rows, columns = whole[:2], whole[2:]
            overwrite_unseen(columns, [*all_gather_outputs, *kept])
            for buffer in rows:  # they hold columns; reading them as rows must fail
                buffer.untyped_storage().resize_(0)
        else:
            rows, columns = whole[:2], whole[2:]
            for buffer in rows[len(all_gather_outputs) :]:
                buffer.untyped_storage().resize_(buffer.nbytes)
            overwrite_unseen(rows[len(all_gather_outputs) :], kept)
            for buffer in columns:
                buffer.untyped_storage().resize_(0)
        return None

    def _other_direction(self, rowwise: list[Tensor]) -> list[Tensor]:
        """Return column-wise buffers whose memory FSDP2 allocates and frees; a backward fills them."""
        assert self._gather.backward_encoder is not None
        # the members of a group are stacked by rows
        described = self._gather.backward_encoder._describe_buffers((rowwise[0].shape[0], self.shape[-1]))
        buffers = [rowwise[0].new_empty(size, dtype=dtype) for size, dtype in described.values()]
        for buffer in buffers:
            buffer.untyped_storage().resize_(0)
        return buffers


class _BeforeGather:
    """``fsdp_pre_all_gather`` of a shard.

    FSDP2 inspects its signature at every gather of every weight: an object that states its own is quicker to inspect
    than a method.
    """

    def __init__(self, weight: ShardedWeight) -> None:
        self._weight = weight

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[bool, list[Tensor]]]:
        """Return what this rank gives and what it keeps: codes and the scales of its blocks; direction, and what all
        have.
        """
        gather, result = self._weight._gather, self._weight._given(mesh, mp_policy)
        if gather.in_place is not None:
            gather.in_place.send(gather, result[0][0])
        return result

    __signature__ = inspect.Signature([*inspect.signature(__call__).parameters.values()][1:])


def _plain(value: Any, found: list[ShardedWeight]) -> Any:
    """Return an argument with the shards instead of weights, which are added to ``found``; quicker than PyTorch's
    trees.
    """
    if isinstance(value, ShardedWeight):
        found.append(value)
        return value._shard
    return [_plain(one, found) for one in value] if isinstance(value, (list, tuple)) else value
