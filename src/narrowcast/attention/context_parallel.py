"""Context parallelism by gathering: every rank has a part of the queries, and for a moment all keys and values.

A sequence is cut into 2·n chunks for n ranks, and rank r has chunks r and 2n - 1 - r: under a causal mask a cheap one
and an expensive one. Keys and values are gathered in order of the ranks, not of the tokens. That needs no reordering,
for who sees whom is decided by positions (``masks.py``), and each gathered key carries its own. Gradients of keys and
values go back to their rank as the sum over all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import shown
from ..autograd.tensor_parallel import GatherRows
from ..functional.collectives import group_name, group_size
from .masks import Geometry, MaskRule, Tokens
from .scores import Scores


class ContextParallel(NamedTuple):
    """Ranks that share sequences. ``group``: name of their process group."""

    group: str | None
    size: int
    rank: int


def context_parallel(cp_group: Any, cp_comm_type: str) -> ContextParallel | None:
    """Return the ranks of a group; None for none, and for one alone.

    Raises:
        NotImplementedError: another exchange than "all_gather".
    """
    if cp_group is None:
        return None
    if cp_comm_type != "all_gather" or isinstance(cp_group, list):
        raise NotImplementedError(
            f"context parallelism (cp_group={shown(cp_group)}) with cp_comm_type={shown(cp_comm_type)} is not there; "
            "pass one group and cp_comm_type='all_gather'"
        )
    name = group_name(cp_group, "cp_group")
    size = group_size(name)
    return None if size == 1 else ContextParallel(name, size, dist.get_rank(cp_group))


def check_context_parallel(
    length: int, qkv_format: str, rule: MaskRule, scores: Scores, cached: bool, max_logit: bool
) -> None:
    """Check that a call can be shared.

    Args:
        length: tokens of this rank.

    Raises:
        NotImplementedError: thd, padding and arbitrary masks, biases, score_mod, the largest logit, a KV cache.
        ValueError: an odd number of tokens, which are no two chunks.
    """
    unsupported = {
        f"{rule.names.qkv_format}='thd'": qkv_format == "thd",
        f"{rule.names.attn_mask_type}={shown(rule.name)}": rule.padding or rule.arbitrary,
        "core_attention_bias": scores.bias is not None,
        "score_mod": scores.score_mod is not None,
        "return_max_logit": max_logit,
        "inference_params": cached,
    }
    for name, wanted in unsupported.items():
        if wanted:
            raise NotImplementedError(f"context parallelism does not go with {name}; leave one of them out")
    if length % 2:
        raise ValueError(f"this rank has {length} tokens; under context parallelism it has two equal chunks")


def gathered(x: Tensor, qkv_format: str, ranks: ContextParallel) -> Tensor:
    """Return the tokens of all ranks, in order of the ranks; its gradient is summed over them."""
    if qkv_format == "sbhd":
        return GatherRows.apply(x, ranks.group)
    return GatherRows.apply(x.transpose(0, 1), ranks.group).transpose(0, 1)


def _positions(length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Return the positions of a rank's tokens, two chunks of ``length // 2``."""
    chunk = torch.arange(length // 2, device=device)
    return torch.cat((chunk + rank * (length // 2), chunk + (2 * size - 1 - rank) * (length // 2)))


def shared_places(
    lengths: tuple[int, int], rule: MaskRule, ranks: ContextParallel, device: torch.device
) -> Geometry:
    """Return where this rank's queries and all ranks' keys stand; the lengths are those of one rank."""
    of_q = _positions(lengths[0], ranks.rank, ranks.size, device)
    of_kv = [_positions(lengths[1], rank, ranks.size, device) for rank in range(ranks.size)]
    shift = (lengths[1] - lengths[0]) * ranks.size if rule.bottom_right else 0
    return Geometry(Tokens(of_q[None], moved=True), Tokens(torch.cat(of_kv)[None], moved=True), shift)
