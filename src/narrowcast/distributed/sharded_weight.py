"""``ShardedWeight``: a shard of a weight in high precision that FSDP2 gathers quantized.

It lives in the sharded parameter, is what the optimizer updates, and has the two functions that ``fully_shard`` calls
around an all-gather. What a forward sees in its place is a quantized tensor of the whole weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ..functional import quantize
from ..quantizers import Quantizer
from ..tensors import assemble_gathered

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
    """How one weight is gathered: one object, which all shards of the weight point to.

    Args:
        encoder: quantizes a shard row-wise; with a ``scale`` from outside where the whole tensor has one.
        quantizer: describes the gathered tensor.
        per_tensor: there is one scale, fp32 (1,), which a forward of the model puts into ``scale``, and its reciprocal.
    """

    def __init__(self, encoder: Quantizer, quantizer: Quantizer, per_tensor: bool) -> None:
        self.encoder, self.quantizer, self.per_tensor = encoder, quantizer, per_tensor
        self.scale: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.written = False  # since the scale was taken

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a gather moves: the codes, and the scales of blocks."""
        buffers = [*self.quantizer._describe_buffers(shape).values()]
        moved = buffers[:1] if self.per_tensor else buffers
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in moved)

    def encode(self, shard: Tensor) -> list[Tensor]:
        """Codes of a shard (rows, K), and its scales: fp32 (1,), or of its own blocks.

        Raises:
            RuntimeError: there is no scale of the weight as it is.
        """
        if self.per_tensor and (self.scale is None or self.written):
            raise RuntimeError(
                "a sharded weight was written to, and has no scale yet: call the model that narrowcast was given to "
                "shard, not a part of it or unshard(); between microbatches without gradient sync weights must stay"
            )
        return quantize(shard, self.encoder, None, self.scale)


class ShardedWeight(Tensor):
    """A shard in high precision that is gathered quantized.

    Args:
        values: the shard, fp32 or bf16. gather: how its weight is gathered.
    """

    @staticmethod
    def __new__(cls, values: Tensor, gather: WeightGather) -> ShardedWeight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor, gather: WeightGather) -> None:
        self._shard, self._gather = values, gather

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shard!r}, gathered with {self._gather.quantizer!r})"

    def __tensor_flatten__(self) -> tuple[list[str], WeightGather]:
        """(name of the values, how they are gathered)."""
        return ["_shard"], self._gather

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: WeightGather, outer_size: Any, outer_stride: Any
    ) -> ShardedWeight:
        """Rebuild from ``__tensor_flatten__``'s parts."""
        return ShardedWeight(inner_tensors["_shard"], context)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedWeight)]
        plain_args, plain_kwargs = pytree.tree_map_only(
            ShardedWeight, lambda weight: weight._shard, (args, kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:  # of lists in place there is no result
            given = {**dict(zip([a.name for a in func._schema.arguments], args)), **(kwargs or {})}
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for written in pytree.tree_leaves(given.get(argument.name)):
                        if isinstance(written, ShardedWeight):
                            written._gather.written = True
            return args[0] if func._schema.returns and isinstance(args[0], ShardedWeight) else result
        if func in _STAYS_A_WEIGHT:
            return pytree.tree_map_only(Tensor, lambda out: ShardedWeight(out, weights[0]._gather), result)
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """(what this rank gives, what it keeps): codes and the scales of its blocks; one scale all ranks have."""
        shard = self._shard if mp_policy.param_dtype is None else self._shard.to(mp_policy.param_dtype)
        codes, scale_inv = self._gather.encode(shard)
        if (
            self._gather.per_tensor
        ):  # what was made by the stream of the model, which is also where it is read
            return (codes,), self._gather.scale_inv
        # FSDP2 hands only the first of several over where there is nobody to gather from
        return (codes, scale_inv), scale_inv if mesh.size() == 1 else None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The whole weight as a quantized tensor; with ``out`` in the one of the first time, whose codes are there."""
        return assemble_gathered(self._gather.quantizer, all_gather_outputs, metadata, param_dtype, out)


def local(tensor: Any) -> Any:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def like(sharded: Any, own: Tensor) -> Any:
    """A tensor that is sharded as another, of which this rank holds ``own``; that itself where nothing is sharded."""
    if not hasattr(sharded, "_local_tensor"):
        return own
    return torch.distributed.tensor.DTensor.from_local(  # type: ignore[attr-defined]
        own,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
