"""Queries, keys, values and outputs that autograd keeps for an attention's backward, as E4M3 codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import decoded, kept_in_codes
from ..upstream.autograd import innermost_hooks


class _Kept(NamedTuple):
    """Codes and scales, as the hooks around return them, and the dtype of their tensor."""

    codes: Any
    scales: Any
    dtype: torch.dtype


def saving_codes(like: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which autograd keeps tensors of several heads as codes, with a scale per 128 channels.

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
            scales, codes = kept_in_codes(x.detach())
        return _Kept(around_pack(codes), around_pack(scales), dtype)

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return around_unpack(kept)  # type: ignore[no-any-return]
        with torch.no_grad():
            return decoded(around_unpack(kept.codes), around_unpack(kept.scales), kept.dtype)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _as_it_is(kept: Any) -> Any:
    return kept
