"""Transformer Engine's helpers that prepare a batch for context parallelism: padding, positions, a rank's chunks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import is_one_of, shown
from ..formats import round_up

Parts = tuple[Tensor, Tensor, Tensor]


def _padded_lengths(cu_seqlens: Tensor, divisibility_factor: int) -> tuple[Tensor, Tensor]:
    """Return lengths of the sequences, and what they are padded to."""
    if divisibility_factor < 1:
        raise ValueError(f"divisibility_factor is {divisibility_factor}; pass a positive number")
    lengths = cu_seqlens.diff()
    return lengths, (lengths + divisibility_factor - 1) // divisibility_factor * divisibility_factor


def _sums(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)))


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> Parts:
    """Pad every packed sequence to a multiple of ``divisibility_factor``.

    Args:
        input_ids, labels: (tokens,) or (1, tokens).
        cu_seqlens: (sequences + 1,) sums of their lengths.
        divisibility_factor: twice the number of ranks, for :func:`get_batch_on_this_cp_rank`.
        padding_token_id, padding_label_id: what is put after each sequence.
    Returns:
        tokens and labels (padded tokens,), and the sums of the padded lengths.
    Raises:
        ValueError: numbers of tokens that do not fit.
    """
    lengths, padded = _padded_lengths(cu_seqlens, divisibility_factor)
    tokens, total = int(cu_seqlens[-1]), int(padded.sum())
    for name, part in (("input_ids", input_ids), ("labels", labels)):
        if part.numel() != tokens:
            raise ValueError(
                f"{name} has {part.numel()} tokens, and cu_seqlens ends at {tokens}; they must be equal"
            )
    sums = _sums(padded)
    # how far the tokens of each sequence move
    shift = torch.repeat_interleave(sums[:-1] - cu_seqlens[:-1], lengths)
    places = torch.arange(tokens, device=cu_seqlens.device) + shift
    filled = [
        torch.full((total,), value, dtype=part.dtype, device=part.device).index_copy_(
            0, places.to(part.device), part.reshape(-1)
        )
        for part, value in ((input_ids, padding_token_id), (labels, padding_label_id))
    ]
    return filled[0], filled[1], sums


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Return positions (padded tokens,) of packed sequences: each begins at 0 and counts on through its padding.

    Args:
        cu_seqlens, divisibility_factor: as of :func:`pad_thd_sequences_for_cp`.
        dtype: of the positions.
    """
    _, padded = _padded_lengths(cu_seqlens, divisibility_factor)
    begins = torch.repeat_interleave(_sums(padded)[:-1], padded)
    return (torch.arange(begins.numel(), device=begins.device) - begins).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor | None,
    input_ids_padded: Tensor,
    labels_padded: Tensor,
    position_ids_padded: Tensor | None,
    cp_group: dist.ProcessGroup | None = None,
    qvk_format: str = "thd",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return this rank's tokens: of each sequence's 2 n chunks, chunk ``rank`` and its mirror from the end.

    So each rank has as much to do under a causal mask. For Transformer Engine's own attention; that of this library
    shares sequences in one piece per rank (``DotProductAttention.set_context_parallel_group``).

    Args:
        cu_seqlens_padded: (sequences + 1,), for thd.
        input_ids_padded, labels_padded, position_ids_padded: thd: (tokens,), (1, tokens) or (tokens, 1); else two dims
            or more. The last may be None.
        cp_group: the ranks.
        qvk_format: "thd", "bshd" or "sbhd".
    Raises:
        ValueError: another format, lengths that do not divide, or too few dims.
    """
    if not is_one_of(qvk_format, ("thd", "bshd", "sbhd")):
        raise ValueError(f"qvk_format is {shown(qvk_format)}; use 'thd', 'bshd' or 'sbhd'")
    if qvk_format == "thd" and cu_seqlens_padded is None:
        raise ValueError("qvk_format='thd' needs cu_seqlens_padded, the sums of the padded lengths")
    size, rank = dist.get_world_size(group=cp_group), dist.get_rank(group=cp_group)
    if size == 1:
        return input_ids_padded, labels_padded, position_ids_padded
    tensors = (input_ids_padded, labels_padded, position_ids_padded)
    parts = []
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        dim, ends = _sequences(tensor, cu_seqlens_padded, qvk_format)
        chosen = [_chunks(begin, end, size, rank) for begin, end in zip(ends, ends[1:])]
        parts.append(tensor.index_select(dim, torch.cat(chosen).to(tensor.device)))
    return parts[0], parts[1], parts[2]


def _sequences(tensor: Tensor, cu_seqlens: Tensor | None, qvk_format: str) -> tuple[int, list[int]]:
    """Return the dim of the tokens, and where the sequences in it begin and end."""
    if qvk_format == "thd":
        assert cu_seqlens is not None
        ends = cu_seqlens.tolist()
        dim = 1 if tensor.dim() > 1 and tensor.shape[1] == ends[-1] else 0
        if not tensor.dim() or tensor.shape[dim] != ends[-1]:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has no dim of the {ends[-1]} padded tokens"
            )
        return dim, ends
    if tensor.dim() < 2:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} with qvk_format={shown(qvk_format)} needs at least 2 dimensions"
        )
    dim = 1 if qvk_format == "bshd" else 0
    return dim, [0, tensor.shape[dim]]


def _chunks(begin: int, end: int, size: int, rank: int) -> Tensor:
    """Return the places of a rank's two chunks of one sequence."""
    if (end - begin) % (2 * size):
        raise ValueError(
            f"a sequence has {end - begin} tokens, which must be divisible by {2 * size}, twice the number of ranks; "
            f"pad it to {round_up(end - begin, 2 * size)}"
        )
    places = torch.arange(begin, end).view(2 * size, -1)
    return places[[rank, 2 * size - 1 - rank]].flatten()
