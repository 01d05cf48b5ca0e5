"""The exchange of rows between ranks: what goes over the wire, and the autograd function that goes back over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._checks import a_kind, shown
from .._tracing import can_return_quantized, once_differentiable
from ..formats import DType
from ..functional import (
    dequantize,
    moe_collect,
    moe_collect_backward,
    moe_collect_coded,
    moe_spread,
    quantize,
)
from ..functional.collectives import sendable
from ..moe.rows import read
from ..quantizers import Quantizer
from ..reference.layout import bytes_of_rows
from ..tensors import has_coded_rows, plain_gradient
from ..upstream.c10d import all_to_all_op, size_of_group_named, wait_op


@dataclasses.dataclass(frozen=True)
class Wire:
    """The format in which rows are sent.

    Args:
        group: name of the process group; "" for one rank without communication.
        ranks: in it.
        quantizer: row-wise, with scales for every row; None sends rows as they are.
        transposed: whether its scales have a column per row.
        coded: whether ``reference.block_scaled_rows`` has the format; ``e5m2``: of its codes.
        delivers_codes: eager code gets what has come as a quantized tensor.
    """

    group: str
    ranks: int
    quantizer: Quantizer | None = None
    transposed: bool = False
    coded: bool = False
    e5m2: bool = False
    delivers_codes: bool = False


class Wires(NamedTuple):
    """The wires of a mixture: rows to the experts, their results, and the gradients of both on their way back."""

    dispatch: Wire
    combine: Wire
    dispatch_grad: Wire
    combine_grad: Wire


class Route(NamedTuple):
    """The row orders before and after the exchange, and back; None to keep the order, else int32, -1 for zeros.

    Tokens that travel to several places have positions as ``before`` and their row map (T, C) as ``before_back``; on
    the way back each becomes the sum of its rows.
    """

    before: Tensor | None
    before_back: Tensor | None
    after: Tensor | None
    after_back: Tensor | None
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""

    def reversed(self) -> Route:
        """Return the way back."""
        return Route(self.after_back, self.after, self.before_back, self.before, self.received, self.sent)


def wire_of(group: str, ranks: int, quantizer: Quantizer | None, name: str, delivers_codes: bool) -> Wire:
    """Return the wire of a quantizer.

    Args:
        name: of the option.
        delivers_codes: as of :class:`Wire`; only FP8 is delivered so.

    Raises:
        TypeError: no quantizer, or one whose rows share scales or draws random numbers.
    """
    if quantizer is None:
        return Wire(group, ranks)
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"{name} is {shown(quantizer)}; pass a quantizer such as nc.MXFP8Quantizer, or None")
    quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
    layout = quantizer._format_layout()
    scales = [buffer for buffer in layout.buffers if buffer.of_direction(False)][1:]
    if layout.scale_group[0] != 1 or len(scales) != 1 or quantizer._is_stochastic():
        raise TypeError(
            f"{name} is {shown(quantizer)}, whose rows do not travel alone; use one with scales per block of a row, "
            "such as nc.MXFP8Quantizer or nc.Float8BlockQuantizer(..., block_scaling_dim=1)"
        )
    coded, transposed = has_coded_rows(quantizer), scales[0].shape[0].size == "K"
    e5m2 = coded and quantizer.dtype == DType.kFloat8E5M2  # type: ignore[attr-defined]
    return Wire(group, ranks, quantizer, transposed, coded, e5m2, delivers_codes and coded)


def start_all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], wire: Wire) -> Tensor:
    """Start sending rows to each rank against rows from each rank; they travel as bytes. ``x`` itself if there is one
    rank.
    """
    if wire.ranks == 1:
        return x
    return all_to_all_op(sendable(bytes_of_rows(x)), list(received), list(sent), wire.group)


def wait_all_to_all(out: Tensor, dtype: torch.dtype, wire: Wire) -> Tensor:
    """Return what :func:`start_all_to_all` brings of rows of that dtype."""
    return out if wire.ranks == 1 else wait_op(out).view(dtype)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], wire: Wire) -> Tensor:
    """Return rows for each rank against rows from each rank; they travel as bytes."""
    return wait_all_to_all(start_all_to_all(x, received, sent, wire), x.dtype, wire)


def travel(x: Tensor, route: Route, wire: Wire) -> Tensor:
    """Return the rows (R, K) at the other end, in the dtype of ``x``; quantized on the way where the wire says so.

    Rows that become one are decoded first and summed in fp32. With scales that are powers of two, bf16 holds a decoded
    row exactly.
    """
    return arrive(depart(x, route, wire), route, wire, x.shape[1], x.dtype)


class Departed(NamedTuple):
    """What is on its way: the parts of a wire, and their dtypes."""

    parts: list[Tensor]
    dtypes: list[torch.dtype]


def depart(x: Tensor, route: Route, wire: Wire) -> Departed:
    """Start sending rows (R, K)."""
    parts = encode(x, wire)
    if route.before is not None:
        back = route.before_back
        copies = 1 if back is None or back.dim() == 1 else back.shape[1]
        parts = [moe_spread(part, route.before, copies) for part in parts]
    started = [start_all_to_all(part, route.received, route.sent, wire) for part in parts]
    return Departed(started, [part.dtype for part in parts])


def arrive(departed: Departed, route: Route, wire: Wire, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the rows (R', ``columns``) of ``dtype`` at the other end, once they are there."""
    parts = arrived(departed, wire)
    if route.after is None:
        return decode(parts, wire, columns, dtype)
    if route.after.dim() == 2:
        return summed(parts, route.after, None, wire, columns, dtype)
    return decode([moe_spread(part, route.after, 1) for part in parts], wire, columns, dtype)


def arrived(departed: Departed, wire: Wire) -> list[Tensor]:
    """Return what a wire carried, once it is there."""
    return [wait_all_to_all(part, kind, wire) for part, kind in zip(*departed, strict=True)]


def summed(
    parts: list[Tensor], row_map: Tensor, weights: Tensor | None, wire: Wire, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return ``moe_collect`` of what a wire carried; FP8 codes are decoded as they are added."""
    if wire.coded:
        return moe_collect_coded(parts[0], parts[1], wire.e5m2, row_map, weights, dtype)
    rows = parts[0] if len(parts) == 1 else decode(parts, wire, columns, dtype)
    return moe_collect(rows, row_map, weights)


def encode(x: Tensor, wire: Wire) -> list[Tensor]:
    """Return what the wire carries of rows (R, K): the rows, or codes (R, ...) and scales (R, ...)."""
    if wire.quantizer is None:
        return [x]
    data, scales = quantize(x, wire.quantizer)
    return [data, scales[:, : x.shape[0]].t().contiguous() if wire.transposed else scales[: x.shape[0]]]


def decode(parts: list[Tensor], wire: Wire, columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows (R, ``columns``) of ``dtype`` from what a wire carried; as a quantized tensor where it delivers
    codes.
    """
    if wire.quantizer is None:
        return parts[0]
    data, scales = parts
    if wire.transposed:
        scales = F.pad(scales.t(), (0, -data.shape[0] % 4)).contiguous()
    else:
        scales = F.pad(scales, (0, 0, 0, -data.shape[0] % 128))
    shape = data.shape[0], columns
    if wire.delivers_codes and can_return_quantized():
        return wire.quantizer._assemble([data, scales], shape, dtype)
    return dequantize([data, scales], wire.quantizer, False, dtype, [*shape])


class Exchange(torch.autograd.Function):
    """Rows travel along a route, and their gradients back.

    ``departed``: the rows, if they are on their way already. ``returning``: where the backward leaves gradients that
    are on their way, for :class:`Returned` to wait for; None to wait here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        route: Route,
        there: Wire,
        back: Wire,
        departed: Departed | None = None,
        returning: Returning | None = None,
    ) -> Tensor:
        ctx.save_for_backward(*route[:4])
        ctx.sent, ctx.received, ctx.wire, ctx.returning = route.sent, route.received, back, returning
        ctx.shape = x.shape
        y = arrive(departed or depart(x, route, there), route, there, x.shape[1], x.dtype)
        return y.view_as(y)  # PyTorch 2.11 loses the gradient of a result that went through a no-op

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = plain_gradient(grad)
        before, before_back, after, after_back = ctx.saved_tensors
        route = Route(before, before_back, after, after_back, ctx.sent, ctx.received).reversed()
        if ctx.returning is None:
            return travel(grad, route, ctx.wire), None, None, None, None, None
        departed = depart(grad, route, ctx.wire)
        ctx.returning.pending = (departed, route, ctx.wire, grad.shape[1], grad.dtype)
        return grad.new_zeros(1).expand(ctx.shape), None, None, None, None, None  # a stand-in


class Combine(torch.autograd.Function):
    """Results travel to their tokens' ranks and are added up there, weighted: (T, N).

    ``route``: keeps the order of what arrives. ``row_map``, ``weights``: (T, E), as of ``moe_collect``. ``positions``:
    the inverse of ``row_map``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        row_map: Tensor,
        positions: Tensor,
        route: Route,
        there: Wire,
        back: Wire,
    ) -> Tensor:
        columns, dtype = rows.shape[1], rows.dtype
        parts = arrived(depart(rows, route, there), there)
        if not there.coded:  # the backward reads them, too
            parts = [decode(parts, there, columns, dtype)]
        ctx.save_for_backward(weights, row_map, positions, *route[:4], *parts)
        ctx.sent, ctx.received, ctx.wires = route.sent, route.received, (there, back)
        return summed(parts, row_map, weights.float(), there, columns, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, row_map, positions, before, before_back, after, after_back, rows, *more = ctx.saved_tensors
        route = Route(before, before_back, after, after_back, ctx.sent, ctx.received)
        (there, back), grad, scales = ctx.wires, plain_gradient(grad), None
        if there.coded:
            (scales,) = more
        drows, sums = moe_collect_backward(grad, rows, positions, weights.float(), scales, there.e5m2)
        back = travel(drows, route.reversed(), back)
        return back, read(sums, row_map).to(weights.dtype), None, None, None, None, None


class Returning:
    """The gradients of one exchange on their way back."""

    pending: tuple[Departed, Route, Wire, int, torch.dtype]


class Returned(torch.autograd.Function):
    """Rows before an exchange; the backward waits for the gradients that :class:`Exchange` left on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, returning: Returning) -> Tensor:
        ctx.returning = returning
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending = ctx.returning.pending
        del ctx.returning.pending
        return arrive(*pending), None


def exact_counts(counts: Tensor, wire: Wire) -> Tensor:
    """Return rows that come from every rank for each expert here, from those that go from here to each expert of each
    rank.
    """
    ones = [1] * wire.ranks
    return all_to_all(counts.contiguous(), ones, ones, wire)


def group_of(group: Any) -> tuple[str, int]:
    """Return name and size of a process group; of the default one for None, and ("", 1) if nothing is initialized.

    Raises:
        TypeError: no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return "", 1
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, str):
        return group, size_of_group_named(group)
    if not hasattr(group, "group_name"):
        raise TypeError(f"group is {a_kind(group)}; pass a torch.distributed process group, or None")
    return group.group_name, group.size()
