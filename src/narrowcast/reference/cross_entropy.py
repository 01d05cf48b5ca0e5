"""Cross entropy of logits by rows: what a row's loss needs to know, and the gradient that follows from it.

What is known of a row is known of a part of its vocabulary, too, and two parts combine: ranks that share a vocabulary
and chunks of one are the same thing. Exponentials differ by a bit between a CPU and a GPU, so this is the one pair of
reference and kernel that agree to fp32's accuracy only, not to the byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._device import HIGH_PRECISION
from .batch_invariant import logsumexp
from .reduction import row_sum


def check(logits: Tensor, target: Tensor) -> None:
    """Refuse what is no matrix of logits with a target per row.

    Raises:
        ValueError: another rank, dtype or number of rows.
    """
    if logits.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"cross entropy takes logits in torch.float32, torch.bfloat16 or torch.float16, got {logits.dtype}"
        )
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross entropy takes logits (T, V) and a target (T,), got {tuple(logits.shape)} and {tuple(target.shape)}"
        )


def statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Return the statistics of each row for the loss, over the columns of this rank.

    Args:
        logits: (T, V), fp32, bf16 or fp16.
        target: (T,), integers; a column of ``logits``, or anything else for a row whose target is not here.

    Returns:
        fp32 (3, T): log of the sum of exponentials, the logit of the target (0 if it is not here), sum of logits.

    Raises:
        ValueError: as :func:`check`.
    """
    check(logits, target)
    x = logits.float()
    here = (target >= 0) & (target < x.shape[1])
    if x.shape[1]:
        column = torch.where(here, target, 0).long()
        at_target = torch.where(here, x.gather(1, column[:, None])[:, 0], 0.0)
    else:
        at_target = x.new_zeros(x.shape[0])
    return torch.stack((logsumexp(x), at_target, row_sum(x)))


def gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    on_target: float,
    everywhere: float,
    in_place: bool = False,
) -> Tensor:
    """Return the gradient of the rows' losses: ``grad * (softmax - on_target * [column is the target] - everywhere)``.

    Args:
        logits, target: as :func:`statistics` takes them.
        lse: fp32 (T,), of the whole vocabulary.
        grad: fp32 (T,); a row whose gradient is 0 gets zeros.
        on_target, everywhere: the share of the target, ``1 - smoothing``, and of each column, ``smoothing / columns``.
        in_place: write over ``logits``.

    Returns:
        (T, V) in the dtype of ``logits``, rounded once.

    Raises:
        ValueError: as :func:`check`.
    """
    check(logits, target)
    softmax = torch.exp(logits.float() - lse[:, None])
    columns = torch.arange(logits.shape[1], device=logits.device)
    share = torch.where(columns == target[:, None], on_target, 0.0)
    scaled = grad[:, None] * (softmax - share - everywhere)
    result = torch.where(grad[:, None] == 0, 0.0, scaled)
    return logits.copy_(result) if in_place else result.to(logits.dtype).contiguous()
