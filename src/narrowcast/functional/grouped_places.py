"""Places of groups in the buffers of an operand: the sizes of these buffers, and each group's part of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import padded_rows, round_up
from .grouped_decoded import ALIGNMENT
from .quantizer_value import BufferTable

_ARENA_ALIGNMENT = 16


class Direction(NamedTuple):
    """The layout of one direction's groups in its buffers.

    ``columns``: K. ``dtype``: of what was quantized.
    """

    layout: str
    quantizer: Any
    columnwise: bool
    columns: int
    dtype: torch.dtype

    def described(self, rows: int) -> BufferTable:
        """Return the buffers of so many rows that are quantized by themselves."""
        return self._quantizer_alone()._describe_buffers((rows, self.columns), self.dtype)

    def _quantizer_alone(self) -> Any:
        return self.quantizer.with_usage(rowwise=not self.columnwise, columnwise=self.columnwise)

    def of_groups(self) -> Direction | None:
        """Return how the buffers in an arena lie; None if it holds group after group, or is none."""
        found = self.quantizer._of_groups(self.columnwise) if self.layout == "split" else None
        return None if found is None else self._replace(quantizer=found[0], layout=found[1])

    def check_graph(self, like: Tensor) -> None:
        """Check that a graph on the device of ``like`` need not read the rows of each group on the host.

        Raises:
            RuntimeError: a GPU would be waited for at every call, for a quantizer of the user's.
        """
        found = self.layout != "split" or self.of_groups() is not None
        if like.device.type != "cuda" or self.quantizer._is_ours() or found:
            return
        raise RuntimeError(
            f"{type(self.quantizer).__name__} takes the rows of each group by themselves: a graph would wait for the "
            "GPU to read m_splits on the host; keep the layer out of compiled code with torch.compiler.disable, or use "
            "a quantizer of narrowcast or a subclass of MXFP8Quantizer or Float8BlockQuantizer"
        )

    def opened(
        self, operand: list[Tensor], shape: tuple[int, ...], groups: int
    ) -> tuple[Direction, list[Tensor]]:
        """Return the direction and its buffers, of an arena that holds those of another layout the latter, as views.

        Args:
            shape: (T, K) of rows, or (G, N, K) of weights.
        """
        inner = self.of_groups()
        if inner is None:
            return self, operand
        views, at = [], 0
        for sizes, kind in inner.shapes(shape, groups):
            count = kind.itemsize * math.prod(sizes)
            views.append(operand[0][at : at + count].view(kind).view(sizes))
            at += round_up(count, _ARENA_ALIGNMENT)
        return inner, views

    def shapes(self, shape: tuple[int, ...], groups: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the buffers of rows (T, K) or weights (G, N, K) in the layouts that need no host."""
        weights = len(shape) == 3
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if weights:
            padded = groups * round_up(shape[1], ALIGNMENT[self.layout])
        else:
            padded = padded_rows(rows, groups, ALIGNMENT[self.layout])
        if self.layout == "tensor":
            transposed = (groups, columns, shape[1]) if weights else (columns, padded)
            return [
                (transposed if self.columnwise else tuple(shape), torch.uint8),
                ((groups,), torch.float32),
            ]
        described = self.described(padded).values()
        return [
            ((groups * sizes[0],) if place[0] < 0 else tuple(sizes), kind)
            for (sizes, kind), place in zip(described, self._places(0, padded), strict=True)
        ]

    def groups_of(self, operand: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
        """Return the operand of every group by itself, as quantizing that group alone would give it.

        Args:
            operand: this direction's buffers, of an arena what :meth:`opened` returns.
            sizes: rows of every group, on the host; also of weights, where all are equal.
        """
        if self.layout == "split":
            return self.split_arena(operand[0], sizes)
        if self.layout == "tensor" and operand[0].dim() == 3:
            return [[codes, operand[1][g : g + 1]] for g, codes in enumerate(operand[0].unbind(0))]
        groups: list[list[Tensor]] = []
        start = padded_start = 0
        for group, size in enumerate(sizes):
            if self.layout == "tensor":
                at = padded_start if self.columnwise else start
                codes = operand[0].narrow(1 if self.columnwise else 0, at, size)
                groups.append([codes.contiguous(), operand[1][group : group + 1]])
            else:
                placed = zip(operand, self._places(padded_start, size), strict=True)
                groups.append(
                    [
                        part_of(buffer, place) if place[0] >= 0 else _of_group(buffer, group, len(sizes))
                        for buffer, place in placed
                    ]
                )
            start, padded_start = start + size, padded_start + round_up(size, ALIGNMENT[self.layout])
        return groups

    def joined(self, members: list[list[Tensor]], rows: int) -> list[Tensor]:
        """Return the buffers of weights (N, K) with ``rows`` N that were quantized one by one: :meth:`groups_of`
        undone.
        """
        if self.layout == "tensor":
            codes, scales = zip(*members)
            return [torch.stack(codes), torch.cat(scales)]
        shape = len(members), rows, self.columns
        whole = [buffer.zero_() for buffer in self.empty(members[0][0], shape)]
        inner, views = self.opened(whole, shape, len(members))
        if inner is not self:
            made = inner.joined([member[: len(views)] for member in members], rows)
            for view, buffer in zip(views, made, strict=True):
                view.copy_(buffer)
            return whole
        if self.layout == "split":
            for place, member in zip(self.split_arena(whole[0], [rows] * len(members)), members, strict=True):
                for view, own in zip(place, member, strict=True):
                    view.copy_(own)
            return whole
        for group, member in enumerate(members):
            places = self._places(group * round_up(rows, ALIGNMENT[self.layout]), rows)
            for (dim, begin, entries, _), buffer, own in zip(places, whole, member, strict=True):
                if dim < 0:
                    _of_group(buffer, group, len(members)).copy_(own)
                else:
                    buffer.narrow(dim, begin, entries).copy_(own.narrow(dim, 0, entries))
        return whole

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """Return uninitialized buffers of weights (G, N, K)."""
        if self.layout == "split":
            return [like.new_empty(self.arena_bytes(shape, shape[0]), dtype=torch.uint8)]
        return [like.new_empty(sizes, dtype=kind) for sizes, kind in self.shapes(shape, shape[0])]

    def _places(self, first: int, count: int) -> list[tuple[int, int, int, int]]:
        """Return where some rows lie in each buffer of the padded layout, as :meth:`Buffer.part` tells it."""
        buffers = self.quantizer._format_layout().buffers
        return [
            buffer.part(first, count, False) for buffer in buffers if buffer.of_direction(self.columnwise)
        ]

    def split_arena(self, arena: Tensor, sizes: list[int]) -> list[list[Tensor]]:
        """Return buffers of every group's operand, as views."""
        at = 0
        groups = []
        for size in sizes:
            views = []
            for shape, kind in self.described(size).values():
                count = kind.itemsize * math.prod(shape)
                views.append(arena[at : at + count].view(kind).view(shape))
                at += round_up(count, _ARENA_ALIGNMENT)
            groups.append(views)
        return groups

    def arena_bytes(self, shape: tuple[int, ...], groups: int) -> int:
        """Return bytes of the arena of rows (T, K) or weights (G, N, K).

        Groups after groups can need as much as if each were as long as whole 128 rows.
        """

        def size(buffers: Any) -> int:
            return sum(
                round_up(kind.itemsize * math.prod(sizes), _ARENA_ALIGNMENT) for sizes, kind in buffers
            )

        inner = self.of_groups()
        if inner is not None:
            return size(inner.shapes(shape, groups))
        rows = round_up(math.prod(shape[:-1]), 128)
        return size(self.described(rows).values()) + groups * size(self.described(128).values())


def _of_group(buffer: Tensor, group: int, groups: int) -> Tensor:
    """Return a group's part of a buffer that has entries for groups, not for rows: an amax, or that of its columns."""
    each = buffer.shape[0] // groups
    return buffer.narrow(0, group * each, each)


def part_of(buffer: Tensor, place: tuple[int, int, int, int]) -> Tensor:
    """Return a buffer's part for some rows, or columns: padded as their own buffer is, and contiguous.

    Args:
        place: as :meth:`Buffer.part` tells it.
    """
    dim, begin, entries, padded = place
    if dim < 0:
        return buffer
    own = buffer.detach().narrow(dim, begin, min(entries, buffer.shape[dim] - begin))
    missing = padded - own.shape[dim]
    return F.pad(own, (0, 0) * (own.dim() - 1 - dim) + (0, missing)) if missing else own.contiguous()
