"""Cross entropy of logits, whose vocabulary may be split over the processes of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import flags, shape_of, tensor
from .._device import HIGH_PRECISION
from .._tracing import once_differentiable
from ..functional import cross_entropy_gradient, cross_entropy_statistics
from ..functional.collectives import gather_rows, group_name, group_size
from .token_loss import Smoothing, check_target, mean_loss, token_gradient, token_loss


class _Shard(NamedTuple):
    """A part of the vocabulary: a group's name, its size, and the rank in it."""

    group: str | None
    size: int
    rank: int


class _CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: Smoothing, shard: _Shard) -> Tensor:
        statistics = cross_entropy_statistics(logits, target - shard.rank * logits.shape[1])
        if shard.size > 1:
            parts = gather_rows(statistics, shard.group).view(shard.size, 3, -1)
            lse = torch.logsumexp(parts[:, 0], 0, keepdim=True)
            statistics = torch.cat((lse, parts[:, 1:].sum(0)))
        loss, lse = token_loss(statistics, target, logits.shape[1] * shard.size, smoothing)
        ctx.save_for_backward(logits, target, lse)
        ctx.smoothing, ctx.shard = smoothing, shard
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, lse = ctx.saved_tensors
        grad = token_gradient(grad_loss, target, ctx.smoothing)
        columns = logits.shape[1]
        local = target - ctx.shard.rank * columns
        smoothing, columns = ctx.smoothing.label_smoothing, columns * ctx.shard.size
        return cross_entropy_gradient(logits, local, lse, grad, smoothing, columns), None, None, None


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Compute the cross entropy of each token in fp32; its gradient has the dtype of the logits.

    It reads the logits once forward and once backward without a copy. It saves the logits, which must not change in
    between, and one number per token. Ranks of a group exchange three numbers per token, once, in the forward. The
    formula is ``torch.nn.functional.cross_entropy``'s.

    Args:
        inp: logits (*lead, V), fp32, bf16 or fp16; with a group this rank's shard of the vocabulary, of equal size on
            all ranks and in rank order. Never modified.
        target: lead, int64 or int32; the same on all ranks, counted over the full vocabulary.
        label_smoothing: as in torch's, from 0 to 1.
        reduce_loss: return the mean over the tokens that are not ignored; 0 if all are.
        dist_process_group: a process group; None for full logits.
        ignore_idx: a token with this target has no loss and no gradient.
        is_cg_capturable: without effect: a CUDA graph can always capture it.

    Returns:
        fp32, shape lead, or a scalar.

    Raises:
        ValueError: another dtype, a target of another shape or dtype, a smoothing outside [0, 1], or a target out of
            range on a CPU (on a GPU, and in compiled code, the token's loss and gradient are NaN).
        TypeError: ``dist_process_group`` is not a process group.
        RuntimeError: the group has no name, or the gradient is differentiated.
    """
    tensor("inp", inp)
    flags(reduce_loss=reduce_loss)
    if inp.dim() < 1 or inp.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"inp has shape {shape_of(inp)} and dtype {inp.dtype}; parallel_cross_entropy takes logits (*lead, V) "
            "in torch.float32, torch.bfloat16 or torch.float16"
        )
    shard = _Shard(None, 1, 0)
    if dist_process_group is not None:
        group = group_name(dist_process_group, "dist_process_group")
        size = group_size(group)
        shard = _Shard(group, size, dist.get_rank(dist_process_group) if size > 1 else 0)
    smoothing = Smoothing(label_smoothing, ignore_idx)
    columns = inp.shape[-1] * shard.size
    check_target(target, columns, smoothing, "inp", inp)
    rows = target.reshape(-1)
    loss = _CrossEntropyFunction.apply(inp.reshape(-1, inp.shape[-1]), rows, smoothing, shard)
    return mean_loss(loss, rows, ignore_idx) if reduce_loss else loss.view(target.shape)
