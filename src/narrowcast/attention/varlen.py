"""Packed tokens by PyTorch's flash kernel for sequences of various lengths (``torch.nn.attention.varlen``).

The kernel writes nothing for tokens after the last sequence, neither output nor gradients; both are set to zero here.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .._tracing import is_eager
from .masks import MaskRule, packed
from .saved_codes import in_codes


class _GradientOfTokens(torch.autograd.Function):
    """The tensor itself; its gradient is zero if there is no token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(valid)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (valid,) = ctx.saved_tensors
        return grad.masked_fill(~valid[:, None, None], 0.0), None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    rule: MaskRule,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
    saves_codes: bool = False,
) -> Tensor:
    """Compute attention of packed tokens.

    Args:
        q: (tokens, h, d), fp16 or bf16 on a GPU.
        k, v: (tokens, g, d); g divides h.
        rule: of a padding type; counts from the bottom right, where it counts.
        cu_seqlens: (b + 1) int32 sums of lengths, of queries and of keys.
        longest: upper bounds of the lengths; None: the number of tokens, which takes longer.
        saves_codes: in eager code, keep int8 codes for the backward.

    Returns:
        (tokens, h, d).
    """
    from torch.nn.attention.varlen import varlen_attn  # takes seconds, so only those who need it wait

    valid_q, valid_kv = (packed(x.shape[0], cu, None).valid for x, cu in zip((q, k), cu_seqlens))
    assert valid_q is not None and valid_kv is not None
    operands = [
        _GradientOfTokens.apply(x, valid[0]) for x, valid in ((q, valid_q), (k, valid_kv), (v, valid_kv))
    ]
    counts = [x.shape[0] if bound is None else bound for x, bound in zip((q, k), longest)]
    # 2.11 supports grouped heads without a flag
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    given: Any = (*operands, *cu_seqlens, *counts)
    run: Any = in_codes(varlen_attn) if saves_codes and is_eager() else varlen_attn
    out: Any = run(*given, scale=scale, window_size=rule.window, **grouped)
    return out.masked_fill(~valid_q[0][:, None, None], 0.0)
