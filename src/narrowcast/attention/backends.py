"""Which backend computes a call: decided by static facts alone, so that a compiled graph holds one of them.

No value of a tensor is read, no memory layout inspected. Every backend says what it cannot do; the first one in the
order of ``ORDER`` that can do everything is taken, and where none is left all of their reasons are told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from .._environment import read_flag


@dataclass(frozen=True)
class Switches:
    """Which kernels may be used, from ``NARROWCAST_*`` of the time when they were read.

    Args:
        flash: FLASH_ATTN, flash kernels. fused: FUSED_ATTN, others that keep no scores in memory: cuDNN's, the
            memory-efficient ones, FlexAttention. unfused: UNFUSED_ATTN, those that do.
        nondeterministic: ALLOW_NONDETERMINISTIC_ALGO, gradients whose last bits change from run to run.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    nondeterministic: bool = True

    @classmethod
    def from_environment(cls) -> Switches:
        """As the variables are set now; all are on by default."""
        names = ("FLASH_ATTN", "FUSED_ATTN", "UNFUSED_ATTN", "ALLOW_NONDETERMINISTIC_ALGO")
        return cls(*(read_flag(name, True) for name in names))


@dataclass(frozen=True)
class Facts:
    """What a call asks for.

    Args:
        cuda: tensors are on a GPU. dtype: of the tensors. dims: head dims of keys and values.
        packed: the format is thd. gaps: and there is padding between its sequences.
        mask: "none", "causal" (PyTorch's flag says it) or "pairs". window: from the diagonal, if there is one.
        bias: dtype of a bias; None without. alibi, sink, score_mod, dropout, max_logit: whether there is one.
        grad: whether a gradient is wanted.
    """

    cuda: bool
    dtype: torch.dtype
    dims: tuple[int, int]
    packed: bool
    gaps: bool
    mask: str
    window: bool
    bias: torch.dtype | None
    alibi: bool
    sink: bool
    score_mod: bool
    dropout: bool
    max_logit: bool
    grad: bool


def sdpa_kernels(facts: Facts, switches: Switches) -> list[SDPBackend]:
    """What PyTorch's own choice may be among; it looks at shapes and devices itself."""
    kernels = []
    exact = switches.nondeterministic or not (facts.cuda and facts.grad)
    if switches.flash and exact and not (facts.cuda and (facts.mask == "pairs" or facts.bias is not None)):
        kernels.append(SDPBackend.FLASH_ATTENTION)
    if switches.fused and exact and facts.cuda:
        kernels += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if switches.unfused:
        kernels.append(SDPBackend.MATH)
    return kernels


def _refused_by_sdpa(facts: Facts, switches: Switches) -> list[str]:
    reasons = []
    if not sdpa_kernels(facts, switches):
        reasons.append("no kernel of PyTorch's is left by NARROWCAST_FLASH_ATTN, _FUSED_ATTN, _UNFUSED_ATTN")
    if facts.alibi:
        reasons.append("it would round ALiBi's bias to the dtype of the queries")
    if facts.bias is not None and facts.bias != facts.dtype:
        reasons.append(f"it takes a bias in {facts.dtype} only, and this one is {facts.bias}")
    if facts.sink:
        reasons.append("its softmax is 'vanilla'")
    if facts.score_mod:
        reasons.append("it has no score_mod")
    if facts.max_logit:
        reasons.append("it does not return the largest logit")
    return reasons


def _refused_by_unfused(facts: Facts, switches: Switches) -> list[str]:
    return [] if switches.unfused else ["NARROWCAST_UNFUSED_ATTN is 0"]


_REFUSALS = {"sdpa": _refused_by_sdpa, "unfused": _refused_by_unfused}


def choose_backend(facts: Facts, switches: Switches) -> str:
    """The first backend that can do it.

    Raises:
        ValueError: none can; the message has the reasons of each.
    """
    refused = []
    for name, refusals in _REFUSALS.items():
        reasons = refusals(facts, switches)
        if not reasons:
            return name
        refused.append(f"{name}: {'; '.join(reasons)}")
    raise ValueError(f"no attention backend is left for this call ({'. '.join(refused)})")
