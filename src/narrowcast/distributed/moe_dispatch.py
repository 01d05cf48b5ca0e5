"""``MoEDispatch``: experts on other ranks than their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from .._checks import a_kind, flags, is_one_of, module, positive
from .._keywords import refuse_keywords
from .._tracing import can_check, can_remember
from ..formats import DType
from ..functional import moe_arrivals, moe_positions
from ..layers import GroupedLinearLayer
from ..layers.described import Experts
from ..moe.permutation import checked_places
from ..quantizers import MXFP8Quantizer, Quantizer
from ..reference.moe_places import fitting
from ..upstream.c10d import group_named
from .moe_exchange import (
    Combine,
    Exchange,
    Returned,
    Returning,
    Route,
    Wires,
    depart,
    exact_counts,
    group_of,
    wire_of,
)
from .wire_receipt import WireReceipt, wire_cost

_Module = TypeVar("_Module", bound=nn.Module)
DEFAULT = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
AS_GRAD = "as grad_quantizer"
WIRES = ("dispatch", "combine", "dispatch_grad", "combine_grad")


class MoEDispatch(nn.Module):
    """The exchange of a mixture: sends tokens to the ranks of their experts and returns the experts' results.

    Rank ``r`` of ``n`` holds experts ``r * E / n`` to ``(r + 1) * E / n``, usually in one ``GroupedLinear`` of ``E /
    n`` groups with its own weights. Rows to the experts are quantized: codes and scales are sent, and dequantized by
    the receiver. All layers of a model may share the object; it has no state.

    Args:
        num_experts: E, over all ranks.
        group: a process group or its name; None: the default group; without ``torch.distributed`` one rank.
        quantizer: quantizer of the rows to the experts, with scales per block of a row; default MXFP8 E4M3. None sends
            high precision.
        combine_quantizer: quantizer of the results; default None.
        grad_quantizer: quantizer of the rows' gradients on their way back from the experts; default None.
        combine_grad_quantizer: quantizer of the results' gradients on their way to the experts; default that of
            ``grad_quantizer``.
        deliver_codes: in eager code, what arrives in FP8 (MXFP8, or blocks of 128 in a row) is handed on as a quantized
            tensor: rows to the experts, and gradients of their results to what computed these. ``GroupedLinear`` reads
            its operands from the codes, with the same bits; other operators decode them. Off by default: kernels of
            your own may need plain memory.
        align_size: the receiver pads the rows of each expert to a multiple of it.
        capacity: None: exact; the counts are read from the device once per forward. A number: every rank sends every
            rank so many rows, padded with zeros, and nothing is read from the device, which a CUDA graph needs. Rows
            beyond it are dropped: their results are zero. With ``topk`` experts per token ``T * min(topk, E / n)``
            drops none.

    Raises:
        ValueError: experts do not divide among the ranks, or a size is not positive.
        TypeError: a quantizer's rows share scales, or ``group`` is not a process group.
    """

    def __init__(
        self,
        num_experts: int,
        group: Any = None,
        *,
        quantizer: Quantizer | None = DEFAULT,
        combine_quantizer: Quantizer | None = None,
        grad_quantizer: Quantizer | None = None,
        combine_grad_quantizer: Quantizer | str | None = AS_GRAD,
        deliver_codes: bool = False,
        align_size: int = 1,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        name, ranks = group_of(group)
        positive(num_experts=num_experts, align_size=align_size)
        flags(deliver_codes=deliver_codes)
        if num_experts % ranks:
            raise ValueError(f"num_experts is {num_experts}; use a multiple of the {ranks} ranks")
        if capacity is not None:
            positive(capacity=capacity)
        self.num_experts, self.align_size, self.capacity = num_experts, align_size, capacity
        self.num_local_experts = num_experts // ranks
        self.part = (group_named(name).rank() if name else 0, ranks)
        quantizers: dict[str, Any] = {
            "quantizer": quantizer,
            "combine_quantizer": combine_quantizer,
            "grad_quantizer": grad_quantizer,
            "combine_grad_quantizer": combine_grad_quantizer,
        }
        if is_one_of(combine_grad_quantizer, (AS_GRAD,)):
            quantizers["combine_grad_quantizer"] = grad_quantizer
        wires = [wire_of(name, ranks, one, label, deliver_codes) for label, one in quantizers.items()]
        self.wires = Wires(*wires)

    def local_experts(self, experts: _Module) -> _Module:
        """Declare that a module holds this rank's experts; checkpoints and exports then name them by their number.

        Rank ``r`` saves its expert ``i`` as expert ``r * E / n + i``, so any number of ranks can load the checkpoint.

        Args:
            experts: a ``GroupedLinear`` of ``num_local_experts`` groups, a module of several, or a ``ModuleList`` of
                ``num_local_experts`` modules.
        Returns:
            ``experts``.
        Raises:
            ValueError: it holds no experts, or another number.
        """
        module("experts", experts)
        grouped = [one for one in experts.modules() if isinstance(one, GroupedLinearLayer)]
        counts = [len(experts)] if isinstance(experts, nn.ModuleList) else [one.num_gemms for one in grouped]
        if set(counts) != {self.num_local_experts}:
            raise ValueError(
                f"{a_kind(experts)} of {counts or 'no'} experts was given; pass GroupedLinear layers of "
                f"{self.num_local_experts} groups, or a ModuleList of as many modules"
            )
        group = self.wires.dispatch.group
        if group:
            vars(experts)["_local_experts"] = Experts(self.num_experts, group)
            for layer in experts.modules():  # also those that are yet to be converted
                vars(layer)["part_of_experts"] = self.part
        return experts

    def extra_repr(self) -> str:
        """Return sizes, as printed by the module."""
        return f"num_experts={self.num_experts}, ranks={self.wires.dispatch.ranks}, capacity={self.capacity}"

    def receipt(self, rows: Tensor) -> WireReceipt:
        """Return what every wire carries of ``rows``, and what it loses; nothing is sent.

        Args:
            rows: (R, K), bf16, fp16 or fp32, finite and typical of what is sent.

        Raises:
            ValueError: ``rows`` is not a matrix, or is empty.
        """
        rows = rows.detach()
        if rows.dim() != 2 or not rows.numel():
            raise ValueError(f"rows has shape {tuple(rows.shape)}; pass (R, K), with at least one row")
        named = zip(WIRES, self.wires, strict=True)
        return WireReceipt(tuple(wire_cost(name, wire, rows) for name, wire in named))

    def dispatch(self, rows: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Send rows to their experts.

        Args:
            rows: (R, K), bf16, fp16 or fp32, those of expert 0, then of expert 1, as ``moe_permute`` returns them.
                Differentiable. With a quantizer, K must fit its format.
            tokens_per_expert: integers (E,) on the device of ``rows``, whose sum is R; with ``capacity`` at most R.

        Returns:
            The rows of the local experts, by expert and within it by rank; the number of rows of each, int64 (E / n,)
                on the
            device, as ``GroupedLinear`` takes it; and the route, for :meth:`combine`.

        Errors are raised before anything is sent.

        Raises:
            ValueError: ``rows`` is not a matrix, or counts have another shape or kind.
        """
        if rows.dim() != 2:
            raise ValueError(f"rows has shape {tuple(rows.shape)}; pass (R, K), as moe_permute returns them")
        if tokens_per_expert.shape != (self.num_experts,) or tokens_per_expert.is_floating_point():
            raise ValueError(
                f"tokens_per_expert is {tokens_per_expert.dtype} of shape {tuple(tokens_per_expert.shape)}; pass "
                f"integers ({self.num_experts},)"
            )
        counts = self._by_rank(tokens_per_expert)
        if self.capacity is None:
            route, splits = self._exact(counts, rows.shape[0])
            if can_check() and sum(route.sent) != rows.shape[0]:
                raise ValueError(
                    f"tokens_per_expert counts {sum(route.sent)} rows; there are {rows.shape[0]}"
                )
        else:
            before, before_back, counts = self._fitting(counts, rows.shape[0])
            route, splits = self._fixed(counts)
            route = route._replace(before=before, before_back=before_back)
        return Exchange.apply(rows, route, self.wires.dispatch, self.wires.dispatch_grad), splits, route

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Return the experts' results to their ranks.

        Args:
            rows: (R', N), in the order of :meth:`dispatch`'s result. Differentiable.
            route: the route that :meth:`dispatch` returned.

        Returns:
            (R, N), in the order of :meth:`dispatch`'s input; zero for dropped rows.
        """
        return Exchange.apply(rows, route.reversed(), self.wires.combine, self.wires.combine_grad)

    def forward(
        self,
        x: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        num_out_tokens: int,
        experts: Callable[[Tensor, Tensor], Tensor],
        shared: Callable[[Tensor], Tensor] | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Run a full mixture: permute, dispatch, experts, combine, sum; the same bits with fewer passes over the rows.

        Args:
            x: (T, K).
            probs, routing_map: (T, E), as ``fused_topk_with_score_function`` returns them.
            num_out_tokens: copies of tokens, ``T * topk``, or more than there are.
            experts: called with rows and the number of rows of each local expert; returns (rows, N).
            shared: a shared expert, (T, K) to (T, N), whose result is added. It runs while rows are on their way to the
                experts, and its backward, in eager code, while their gradients are on the way back.

        Returns:
            (T, N).
        """
        if unknown:
            refuse_keywords(self, unknown)
        placed = checked_places(
            x, routing_map, num_out_tokens, "MoEDispatch", self.wires.dispatch.ranks, self.capacity
        )
        row_map, positions, counts = placed
        # Tokens are quantized once, whatever the number of their experts, and copied to where they leave from; what
        # comes back is added up where it arrives.
        if self.capacity is None:
            route, splits = self._exact(self._by_rank(routing_map.sum(0)), num_out_tokens)
            positions = moe_positions(row_map, sum(route.sent))
        else:
            route, splits = self._fixed(self._by_rank(counts))
        there = route._replace(before=positions, before_back=row_map)
        arrived, beside = self._arrived(x, there, shared)
        home = route.reversed()
        results = experts(arrived, splits)
        y = Combine.apply(
            results, probs, row_map, positions, home, self.wires.combine, self.wires.combine_grad
        )
        return y if beside is None else y + beside

    def _arrived(
        self, x: Tensor, route: Route, shared: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the local experts, and what the shared expert computed while they were on their way."""
        there, back = self.wires.dispatch, self.wires.dispatch_grad
        if shared is None:
            return Exchange.apply(x, route, there, back), None
        # a graph holds starts and waits as they are; its backward is the compiler's to order
        returning = Returning() if can_remember() else None
        # Before the shared expert, so that its backward comes after that of the shared expert.
        routed = x if returning is None else Returned.apply(x, returning)
        with torch.no_grad():
            departed = depart(x, route, there)
        beside = shared(x)
        return Exchange.apply(routed, route, there, back, departed, returning), beside

    def _by_rank(self, tokens_per_expert: Tensor) -> Tensor:
        return tokens_per_expert.to(torch.int64).view(self.wires.dispatch.ranks, self.num_local_experts)

    def _exact(self, counts: Tensor, rows: int) -> tuple[Route, Tensor]:
        """Return rows as many as there are; the one place that reads from the device."""
        came = exact_counts(counts, self.wires.dispatch)
        sizes = (came.sum(0) + (self.align_size - 1)) // self.align_size * self.align_size
        known = torch.cat([counts.sum(1), came.sum(1), sizes.sum().view(1)]).tolist()
        for size in known:
            torch._check(size >= 0)
        ranks = self.wires.dispatch.ranks
        sent, received = known[:ranks], known[ranks : 2 * ranks]
        if can_check() and sum(sent) > rows:
            raise ValueError(
                f"routing_map has {sum(sent)} copies; num_out_tokens is {rows}, pass at least as many"
            )
        source, back, splits = moe_arrivals(came, 0, known[-1], sum(received), self.align_size)
        return Route(None, None, source, back, sent, received), splits

    def _fixed(self, counts: Tensor) -> tuple[Route, Tensor]:
        """Receive equally many rows of every rank, for any counts; nothing is read from the device."""
        assert self.capacity is not None
        ranks, capacity = self.wires.dispatch.ranks, self.capacity
        came = exact_counts(counts, self.wires.dispatch)
        most = ranks * capacity + self.num_local_experts * (self.align_size - 1)
        source, back, splits = moe_arrivals(came, capacity, most, ranks * capacity, self.align_size)
        sizes = [capacity] * ranks
        return Route(None, None, source, back, sizes, sizes), splits

    def _fitting(self, counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return which of rows by expert leave from each place, its inverse, and how many go to each expert."""
        assert self.capacity is not None
        begins = counts.sum(1).cumsum(0) - counts.sum(1)
        kept = fitting(counts, self.capacity)
        slot = torch.arange(self.capacity, device=counts.device)
        leaves = slot < kept.sum(1, keepdim=True)
        before = torch.where(leaves, begins.unsqueeze(1) + slot, -1).reshape(-1).to(torch.int32)
        return before, moe_positions(before, rows), kept
