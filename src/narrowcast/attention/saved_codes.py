"""Tensors that an attention keeps for its backward as int8 codes, in eager code and in graphs.

A head's channels have a scale. Scores are exponents, so queries and keys are kept more finely than E4M3 does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import decode_int8_rows, encode_int8_rows
from ..state import checkpoint
from ..upstream.autograd import innermost_hooks


class _Kept(NamedTuple):
    """Codes and scales, as the hooks around return them, and the dtype of their tensor."""

    codes: Any
    scales: Any
    dtype: torch.dtype


def saving_codes(like: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which autograd keeps tensors of several heads as codes, with a scale per head.

    The attention may be any of PyTorch's: its forward is unchanged, and its backward gets the decoded values. Hooks
    around it, of a checkpoint or of offloading, get codes and scales. For eager code.

    Args:
        like: the queries. A tensor of other channels or of another dtype, such as the sums of a softmax, stays.
    """
    dtype, channels = like.dtype, like.shape[-1]
    around_pack, around_unpack = innermost_hooks() or (_as_it_is, _as_it_is)

    def pack(x: Tensor) -> Any:
        if x.dtype != dtype or x.dim() < 3 or x.shape[-1] != channels:
            return around_pack(x)
        with torch.no_grad():
            codes, scales = encode_int8_rows(x.detach())
        return _Kept(around_pack(codes), around_pack(scales), dtype)

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return around_unpack(kept)  # type: ignore[no-any-return]
        with torch.no_grad():
            return decode_int8_rows(around_unpack(kept.codes), around_unpack(kept.scales), kept.dtype)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _as_it_is(kept: Any) -> Any:
    return kept


class _Decoded(torch.autograd.Function):
    """(x, its codes and scales) -> decoded values, as if they were ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return decode_int8_rows(codes, scales, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _InPlaceOf(torch.autograd.Function):
    """(y, z) -> y, whose gradient is that of z."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, again: Tensor) -> Tensor:
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad


def recomputed_from_codes(attend: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """Return ``attend(*parts)``; its backward computes it again, from codes of ``parts``, and is that one's.

    A graph cannot replace what PyTorch's attention saves. Here it saves codes and scales alone, neither output nor sums
    of a softmax. For traced code: the second attention is in the backward's graph alone.

    Args:
        attend: without random numbers.
        parts: queries, keys and values.
    """
    with torch.no_grad():
        out = attend(*parts)
        kept = [tensor for part in parts for tensor in encode_int8_rows(part)]

    def again(*tensors: Tensor) -> Tensor:
        coded = tensors[len(parts) :]
        return attend(*map(_Decoded.apply, tensors[: len(parts)], coded[::2], coded[1::2]))

    return _InPlaceOf.apply(out, checkpoint(again, *parts, *kept))  # type: ignore[no-any-return]
