"""Rows in groups, each padded to whole 128 rows, so that no block of a format is in two groups."""

from torch import Tensor

from . import grouped_padding


def rows_of_groups(x: Tensor, splits: Tensor, count: int) -> Tensor:
    """Return ``grouped_padding.pad_rows`` to groups of whole 128 rows; ``count``: rows of the result."""
    return grouped_padding.pad_rows(x, splits, 128, count)[0]
