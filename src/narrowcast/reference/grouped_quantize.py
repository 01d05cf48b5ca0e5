"""Per-tensor FP8 of groups: rows of one matrix, or a batch of matrices, each group with a scale of its own.

Row-wise codes keep the place of their rows. Transposed codes are the second operand of a weight gradient, which
contracts over a group's rows, so there each group starts at a multiple of an alignment, zeros in between.
"""

import torch
from torch import Tensor

from .._tracing import host_values
from ..formats import FLT_MAX, ElementFormat, padded_rows, round_up
from . import reduction, scaling
from .float8 import quantize as quantize_tensor


def quantize(
    x: Tensor,
    splits: Tensor | None,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None = None,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Quantize every group with its given scale.

    Args:
        x: fp32, bf16 or fp16: (T, K), groups of rows one after the other; or (G, N, K) without ``splits``.
        splits: int32 or int64 (G,), rows of each group, non-negative; a group may be empty.
        scale: fp32 (G,), multiplies when encoding.
        fmt: E4M3 or E5M2.
        rowwise: produce the codes in the order of ``x``.
        columnwise: produce the transposed codes.
        alignment: where groups start in the transposed codes of rows.
        amax: fp32 (G,); raised to the groups' max|x| (NaN ignored). None: no amax is taken.
        unseen: as in ``float8.quantize``.

    Raises:
        TypeError: ``x`` has another dtype.

    Numerics:
        ``[data uint8, as x] [transpose uint8 (K, P) or (G, K, N)] scale_inv fp32 (G,)``; of every group what
        ``float8.quantize`` gives; ``P = round_up(T + G * (alignment - 1), alignment)``. Codes of rows beyond the sum of
        the splits, and between the groups, are 0.
    """
    groups = scale.shape[0]
    parts, scale_inv = _parts(x, splits), x.new_empty(groups, dtype=torch.float32)
    if splits is None:
        data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        transpose = data.new_empty((groups, x.shape[2], x.shape[1]))
        places = list(data.unbind(0))
        transposed = list(transpose.unbind(0))
    else:
        T, K = x.shape
        sizes, starts, padded_starts = extents(splits, T, alignment)
        data = torch.zeros((T, K), dtype=torch.uint8, device=x.device)
        transpose = data.new_zeros((K, padded_rows(T, groups, alignment)))
        places = [data[start : start + size] for start, size in zip(starts, sizes)]
        transposed = [transpose[:, start : start + size] for start, size in zip(padded_starts, sizes)]
    for group in range(groups):
        at = slice(group, group + 1)
        own = None if amax is None else amax[at]
        codes, scale_inv[at] = quantize_tensor(
            parts[group], scale[at], fmt, rowwise=True, columnwise=False, amax=own, unseen=unseen
        )
        places[group].copy_(codes)
        transposed[group].copy_(codes.t())
    return ([data] if rowwise else []) + ([transpose] if columnwise else []) + [scale_inv]


def quantize_current(
    x: Tensor,
    splits: Tensor | None,
    fmt: ElementFormat,
    *,
    groups: int,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    alignment: int,
    amax: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """Quantize every group with the scale of its own amax.

    Args:
        x, splits, fmt, rowwise, columnwise, alignment: as in ``quantize``.
        groups: G.
        power_2: round the scales down to powers of two.
        epsilon: lower bound of an amax.
        amax: ``amaxes(x, splits, groups)``, where that is known.
        keep_amax: return the amaxes after the buffers.

    Raises:
        TypeError: ``x`` has another dtype.

    Numerics:
        Buffers as in ``quantize``; the scale of a group is ``scale_from_amax`` with fp32's maximum on overflow.
    """
    amax = amaxes(x, splits, groups) if amax is None else amax
    scale = scaling.scale_from_amax(amax, fmt.max, power_2=power_2, epsilon=epsilon, overflow=FLT_MAX)
    buffers = quantize(x, splits, scale, fmt, rowwise=rowwise, columnwise=columnwise, alignment=alignment)
    return [*buffers, amax] if keep_amax else buffers


def amaxes(x: Tensor, splits: Tensor | None, groups: int) -> Tensor:
    """Return max|x| of every group: fp32 (G,).

    Args:
        x, splits, groups: as of ``quantize_current``.
    """
    if not groups:
        return x.new_zeros(0, dtype=torch.float32)
    return torch.cat([scaling.amax(part) for part in _parts(x, splits)])


def column_sum(x: Tensor, splits: Tensor) -> Tensor:
    """Sum over the rows of every group.

    Args:
        x: fp32, bf16 or fp16 (T, K), the groups one after the other.
        splits: int32 or int64 (G,).

    Numerics:
        fp32 (G, K), of every group what ``reduction.column_sum`` gives; an empty group gives 0.
    """
    sums = [reduction.column_sum(part.float()) for part in _parts(x, splits)]
    return torch.stack(sums) if sums else x.new_zeros((0, x.shape[1]), dtype=torch.float32)


def _parts(x: Tensor, splits: Tensor | None) -> list[Tensor]:
    """Return every group's rows, or its matrix."""
    if splits is None:
        return list(x.unbind(0))
    sizes, starts, _ = extents(splits, x.shape[0], 1)
    return [x[start : start + size] for start, size in zip(starts, sizes)]


def extents(splits: Tensor, rows: int, alignment: int) -> tuple[list[int], list[int], list[int]]:
    """Return sizes, starts and padded starts of the groups on the host.

    Args:
        splits: int32 or int64 (G,).
        rows: T; what does not fit is cut.
        alignment: rows that every padded group is a multiple of.

    Numerics:
        Three lists of G numbers.
    """
    sizes: list[int] = []
    starts: list[int] = []
    padded_starts: list[int] = []
    start = padded_start = 0
    for size in host_values(splits):
        starts.append(min(start, rows))
        sizes.append(max(min(size, rows - start), 0))
        padded_starts.append(padded_start)
        start += size
        padded_start += round_up(size, alignment)
    return sizes, starts, padded_starts
