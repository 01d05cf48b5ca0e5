"""Sources of rows in groups: each group is padded to whole 128 rows, and looked up where the rows are."""

from __future__ import annotations

from torch import Tensor

from . import grouped_padding
from .fused_producers import Source, materialize, source_of


def rows_of_groups(x: Tensor | Source, splits: Tensor, count: int) -> Source:
    """Return ``grouped_padding.pad_rows`` to groups of whole 128 rows, looked up on the way in.

    Args:
        x: (T, K), a tensor, or a source of codes, of a gated activation or of its gradient.
        splits: int32 or int64 (G,) on the device of ``x``.
        count: rows of the padded matrix, a multiple of 128.
    """
    source = source_of(x, 2)
    kind, *function = source.constants
    table = grouped_padding.blocks_of_groups(splits, source.shape[0], count)
    return Source(
        (count, source.shape[1]),
        source.dtype,
        (*source.operands, table),
        (f"groups {kind}", *function),  # type: ignore[arg-type]
        lambda _: grouped_padding.pad_rows(materialize(source), splits, grouped_padding.BLOCK_ROWS, count)[0],
    )
