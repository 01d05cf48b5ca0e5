"""Tensors that an attention keeps for its backward as int8 codes, in eager code and in graphs.

A row of channels has a scale. Scores are exponents, so queries and keys are kept more finely than E4M3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import decode_int8_rows, encode_int8_rows
from ..upstream.autograd import innermost_hooks, traced_hooks


class _Kept(NamedTuple):
    """Codes and scales, as the hooks around return them, and the dtype and order of dims of their tensor."""

    codes: Any
    scales: Any
    dtype: torch.dtype
    order: Sequence[int]


def saving_codes(like: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which autograd keeps tensors of several heads as codes, with a scale per row.

    The attention may be any of PyTorch's: its forward is unchanged, and its backward gets the decoded values. Hooks
    around it, of a checkpoint or of offloading, get codes and scales. For eager code.

    Args:
        like: the queries. A tensor of other channels or of another dtype, such as the sums of a softmax, stays.
    """
    return _hooks(like, *(innermost_hooks() or (_as_it_is, _as_it_is)))


def _hooks(
    like: Tensor, around_pack: Callable[[Any], Any], around_unpack: Callable[[Any], Any]
) -> torch.autograd.graph.saved_tensors_hooks:
    dtype, channels = like.dtype, like.shape[-1]

    def pack(x: Tensor) -> Any:
        if x.dtype != dtype or x.dim() < 3 or x.shape[-1] != channels:
            return around_pack(x)
        order = _order_in_memory(x)
        with torch.no_grad():
            codes, scales = encode_int8_rows(x.detach().permute(*order))
        return _Kept(around_pack(codes), around_pack(scales), dtype, order)

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return around_unpack(kept)  # type: ignore[no-any-return]
        with torch.no_grad():
            x = decode_int8_rows(around_unpack(kept.codes), around_unpack(kept.scales), kept.dtype)
        return x.permute(*sorted(range(x.dim()), key=kept.order.__getitem__))

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _as_it_is(kept: Any) -> Any:
    return kept


def _order_in_memory(x: Tensor) -> Sequence[int]:
    """Return the dims by falling strides, channels last: so a transposed tensor is encoded without a copy."""
    strides = x.stride()[:-1]
    if all(type(stride) is int for stride in strides):
        return [*sorted(range(len(strides)), key=lambda dim: -strides[dim]), len(strides)]
    return range(x.dim())


def in_codes(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention that keeps codes for its backward, for traced code; Dynamo must be told not to look inside.

    What traces the backward sees the hooks: the graph encodes after the forward, and decodes in the backward.

    Args:
        attention: takes queries, then other tensors and constants.
    """

    def run(queries: Tensor, *others: Any, **options: Any) -> Tensor:
        with traced_hooks(), _hooks(queries, _as_it_is, _as_it_is):
            return attention(queries, *others, **options)

    return run
