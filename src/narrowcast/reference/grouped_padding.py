"""Rows of groups (the tokens of the experts of a grouped GEMM), each group padded to whole alignments and back."""

import torch
from torch import Tensor

from .layout import bytes_of_rows


def pad_rows(x: Tensor, splits: Tensor, alignment: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-pad each group of rows to a multiple of ``alignment`` rows.

    Args:
        x: shape (T, K), any dtype; the groups one after the other.
        splits: int32 or int64 [G], rows of each group, non-negative; a group may be empty.
        alignment: rows that every padded group is a multiple of.
        rows: rows of the result; padded groups that do not fit are cut.

    Numerics:
        ``padded`` (rows, K), zero outside the groups, also after the last one; rows of ``x`` beyond the sum of
        the splits are dropped. ``padded_splits`` like ``splits``; ``padded_ends`` int32 [G], their running sum.
    """
    padded_splits = _aligned(splits, alignment)
    ends, padded_ends = splits.cumsum(0), padded_splits.cumsum(0)
    source = _source_of_rows(rows, padded_ends, ends, x.shape[0])
    return _gather(x, source), padded_splits, padded_ends.to(torch.int32)


def unpad_rows(padded: Tensor, splits: Tensor, alignment: int, rows: int) -> Tensor:
    """Undo ``pad_rows`` of the same splits and alignment: (``rows``, K), zero beyond the sum of the splits."""
    ends, padded_ends = splits.cumsum(0), _aligned(splits, alignment).cumsum(0)
    return _gather(padded, _source_of_rows(rows, ends, padded_ends, padded.shape[0]))


def _aligned(splits: Tensor, alignment: int) -> Tensor:
    return (splits + (alignment - 1)).div(alignment, rounding_mode="floor").mul(alignment)


def _source_of_rows(rows: int, ends: Tensor, source_ends: Tensor, available: int) -> Tensor:
    """For each row of the result, whose groups end at ``ends``, the row it comes from, or -1."""
    row = torch.arange(rows, device=ends.device)
    if ends.numel() == 0:
        return torch.full_like(row, -1)
    group = torch.searchsorted(ends, row, right=True)
    known = group.clamp(max=ends.numel() - 1)
    zero = ends.new_zeros(1)
    starts, source_starts = torch.cat([zero, ends[:-1]]), torch.cat([zero, source_ends[:-1]])
    source = source_starts[known] + (row - starts[known])
    inside = (group < ends.numel()) & (source < source_ends[known]) & (source < available)
    return torch.where(inside, source, -1)


def _gather(x: Tensor, source: Tensor) -> Tensor:
    """Return rows of ``x`` by number; zeros for -1."""
    if x.numel() == 0:
        return x.new_zeros((source.shape[0], x.shape[1]))
    # the rows are moved as bytes, so that every dtype is and a NaN in the row that stands in for -1 does no harm
    raw = bytes_of_rows(x)
    keep = (source >= 0).to(torch.uint8).neg().unsqueeze(1)
    return raw[source.clamp(min=0)].bitwise_and_(keep).view(x.dtype)
