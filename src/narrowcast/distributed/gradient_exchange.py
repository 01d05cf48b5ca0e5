"""``GradientExchange``: FSDP2's reduction of gradients in fp32, for which 16 bits per element travel.

FSDP2 casts what 16-bit computation leaves as gradients to fp32, copies it into one buffer, and reduces and scatters
that; then it casts the sums to the parameters' dtype. Here each rank is sent the others' gradients of its shard as they
were computed, large ones from where they lie, sums them in fp32 and writes them in the parameters' dtype. The first
cast adds nothing, so it is the same sum; of more than two ranks perhaps in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..functional.collectives import reduce_scatter_single
from ..functional.numerics import numerics_for
from ..upstream.fsdp import cat_chunks
from .stand_in import Contents, StandIn

_LARGE = 1 << 18  # bytes to one rank; what is smaller travels together
_PIECE = 1 << 26  # elements to one rank of a transfer that nothing runs beside, at most


class GradientExchange:
    """For ``FSDPModule.set_custom_reduce_scatter`` of modules that compute in 16 bits and reduce in fp32.

    Gradients that an earlier backward of the step left are in fp32 already, and reduced as FSDP2 does.
    """

    def __init__(self, dtype_stated: bool = True) -> None:
        self._dtype_stated = dtype_stated
        self._kept: torch.dtype | None = None
        self._accumulates = self._leaves = False
        # in the backward of this forward, and of the one before
        self._reductions = self._reductions_before = 0
        self._contents = Contents()  # contents of the next buffer
        self._stream: Any = None  # the model's stream, on a GPU

    def begin(self, reduces: bool, kept: torch.dtype | None) -> None:
        """A forward begins. Ranks do alike, whichever have gradients by then.

        Args:
            reduces: whether its backward does.
            kept: the dtype of the gradients that FSDP2 makes of the sums; None if something else reads them before.
        """
        self._kept = kept
        self._accumulates, self._leaves = self._leaves, not reduces
        self._reductions_before, self._reductions = self._reductions, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a stand-in for the reduced modules' gradients; once filled, memory for their sums.

        Sums that stay until the optimizer's step get memory of the model's stream, which the backward gives back
        meanwhile. FSDP2 takes that of its own stream, where nothing else can use it in a forward.
        """
        if dtype == torch.float32 and not self._contents.tensors:
            self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            return StandIn(self._contents, size, dtype, device)
        if not self._contents.tensors:
            return torch.empty(*size, dtype=dtype, device=device)
        self._contents = Contents()
        if self._stream is None or self._kept is None:
            return torch.empty(*size, dtype=self._kept or torch.float32, device=device)
        with torch.cuda.stream(self._stream):  # which the current one has waited for
            sums = torch.empty(*size, dtype=self._kept, device=device)
        sums.record_stream(torch.cuda.current_stream(device))
        return sums

    def __call__(
        self, output_tensor: Tensor, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Put this rank's part of the ranks' sum, or mean, into ``output_tensor``, in the stream that this runs in."""
        if not isinstance(input_tensor, StandIn):
            return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        gradients, ranks = input_tensor.contents.tensors, group.size()
        divisor = {dist.ReduceOp.SUM: 1, dist.ReduceOp.AVG: ranks}.get(op)
        travels = len({one.dtype for one in gradients}) == 1 and gradients[0].dtype != input_tensor.dtype
        if self._accumulates or divisor is None or not travels:
            buffer = torch.empty(input_tensor.shape, dtype=input_tensor.dtype, device=output_tensor.device)
            self._say_what_travels(buffer.dtype)
            gradients = [one.to(buffer.dtype) for one in gradients]
            cat_chunks(gradients, 0, ranks, out=buffer.view(ranks, -1))
            sums = output_tensor
            if sums.dtype != buffer.dtype:
                sums = torch.empty_like(output_tensor, dtype=buffer.dtype)
            work = reduce_scatter_single(sums, buffer, group=group, op=op, async_op=async_op)
            if sums is not output_tensor:
                if work is not None:
                    work.wait()
                output_tensor.copy_(sums)
            return work
        self._reductions += 1
        alone = self._reductions == self._reductions_before  # the last of a backward: no GEMM runs beside it
        for own, others, part in _exchanged(gradients, output_tensor, group, one_by_one=alone):
            numerics_for(own).reduction.rank_sum(own, others, group.rank(), divisor, part, alone)
        return None

    def _say_what_travels(self, dtype: torch.dtype) -> None:
        """Warn once where the release chose to send fp32: since PyTorch 2.15 without a ``reduce_dtype``."""
        if not self._dtype_stated:
            self._dtype_stated = True
            warnings.warn(
                f"accumulated gradients travel in {dtype}: mp_policy has no reduce_dtype, and PyTorch "
                f"{torch.__version__} then reduces in the dtype of the parameters; pass reduce_dtype=torch.bfloat16 to "
                "send half the bytes, or reduce_dtype=torch.float32 to keep this",
                stacklevel=2,
            )


def _exchanged(
    gradients: list[Tensor], output: Tensor, group: Any, one_by_one: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, of this rank's part of a gradient, its own values, the others' (ranks - 1, n), and the sum's place.

    Args:
        one_by_one: start a transfer for each, in pieces, so that the first sum need not wait for the last to arrive;
            else one transfer, whose kernel has to find free processors beside the GEMMs once.
    """
    ranks = group.size()
    counts = [-(-one.shape[0] // ranks) * one[0].numel() for one in gradients]  # as FSDP2 pads them
    parts = output.split(counts)
    small: list[int] = []
    sent: list[tuple[list[Any], Tensor, Tensor, Tensor]] = []
    # large ones first: the last sum hides behind nothing
    for index in sorted(range(len(gradients)), key=lambda at: -counts[at]):
        gradient, count, part = gradients[index], counts[index], parts[index]
        if gradient.shape[0] % ranks or count * gradient.itemsize < _LARGE:
            small.append(index)
        else:
            rows, piece = gradient.contiguous().view(ranks, count), _PIECE if one_by_one else count
            sent += [
                (*_transfers(some, group), place)
                for some, place in zip(rows.split(piece, 1), part.split(piece), strict=True)
            ]
    together = [counts[index] for index in small]
    rows = output.new_empty(ranks, sum(together), dtype=gradients[0].dtype)
    if small:
        cat_chunks([gradients[index] for index in small], 0, ranks, out=rows)
        sent.append((*_transfers(rows, group), rows.new_empty(rows.shape[1], dtype=output.dtype)))
    batches = [transfers for transfers, *_ in sent]
    batches = batches if one_by_one else [[one for batch in batches for one in batch]]
    works = [dist.batch_isend_irecv(batch) for batch in batches]
    for index, (_, own, others, part) in enumerate(sent):  # sum received rows while the next are in transit
        for work in works[index] if index < len(works) else ():
            work.wait()
        yield own, others, part
    if small:
        torch._foreach_copy_([parts[index] for index in small], sent[-1][-1].split(together))


def _transfers(rows: Tensor, group: Any) -> tuple[list[Any], Tensor, Tensor]:
    """What sends every rank its row: (transfers to start, this rank's own row, the rows that come from the others)."""
    ranks, rank = group.size(), group.rank()
    others = rows.new_empty(ranks - 1, rows.shape[1])
    transfers = []
    for step in range(1, ranks):  # each at another rank's turn
        to, of = (rank + step) % ranks, (rank - step) % ranks
        transfers.append(dist.P2POp(dist.isend, rows[to], group=group, group_peer=to))
        transfers.append(dist.P2POp(dist.irecv, others[of - (of > rank)], group=group, group_peer=of))
    return transfers, rows[rank], others
