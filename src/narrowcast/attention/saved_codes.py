"""Tensors that an attention keeps for its backward as int8 codes, in eager code and in graphs.

A row of channels has a scale. Scores are exponents, so queries and keys are kept more finely than E4M3 does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import decode_int8_rows, encode_int8_rows
from ..upstream.autograd import innermost_hooks, traced_hooks
from ..upstream.tensors import storage_key


class _Codes(NamedTuple):
    """Codes and scales, as the hooks around return them, and the dtype and order of dims of their tensor."""

    codes: Any
    scales: Any
    dtype: torch.dtype
    order: Sequence[int]


class _Saved:
    """A tensor that autograd saves; once the attention has returned, ``kept`` is what stays of it."""

    def __init__(self, x: Tensor) -> None:
        self.kept: Any = x


def in_codes(attention: Callable[..., Any], *, traced: bool = False) -> Callable[..., Tensor]:
    """Return an attention that keeps queries, keys, values and output as codes for its backward.

    Its forward is unchanged, and its backward gets the decoded values. Masks and whatever else it saves stay as they
    are. Hooks around it, of a checkpoint or of offloading, get codes and scales.

    Args:
        attention: takes queries, keys and values, then other tensors and constants.
        traced: for traced code; Dynamo must be told not to look inside. What traces the backward then calls the hooks,
            so the graph encodes after the forward and decodes in the backward.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
        saved: list[_Saved] = []
        around_pack, around_unpack = (None if traced else innermost_hooks()) or (_as_it_is, _as_it_is)
        seen = traced_hooks() if traced else contextlib.nullcontext()

        def pack(x: Tensor) -> _Saved:
            saved.append(_Saved(x))
            return saved[-1]

        def unpack(one: _Saved) -> Tensor:
            kept = one.kept
            return _decoded(kept, around_unpack) if isinstance(kept, _Codes) else around_unpack(kept)

        with seen, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = attention(q, k, v, *others, **options)
        named = {storage_key(x) for x in (q, k, v, out)}
        for one in saved:
            x = one.kept
            one.kept = _encoded(x, around_pack) if storage_key(x) in named else around_pack(x)
        return out

    return run


def _encoded(x: Tensor, around_pack: Callable[[Any], Any]) -> _Codes:
    order = _order_in_memory(x)
    with torch.no_grad():
        codes, scales = encode_int8_rows(x.detach().permute(*order))
    return _Codes(around_pack(codes), around_pack(scales), x.dtype, order)


def _decoded(kept: _Codes, around_unpack: Callable[[Any], Any]) -> Tensor:
    with torch.no_grad():
        x = decode_int8_rows(around_unpack(kept.codes), around_unpack(kept.scales), kept.dtype)
    return x.permute(*sorted(range(x.dim()), key=kept.order.__getitem__))


def _as_it_is(kept: Any) -> Any:
    return kept


def _order_in_memory(x: Tensor) -> Sequence[int]:
    """Return the dims by falling strides, channels last: so a transposed tensor is encoded without a copy."""
    strides = x.stride()[:-1]
    if all(type(stride) is int for stride in strides):
        return [*sorted(range(len(strides)), key=lambda dim: -strides[dim]), len(strides)]
    return range(x.dim())
