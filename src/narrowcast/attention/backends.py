"""The choice of an attention backend from static facts, so that a compiled graph holds one backend.

No value of a tensor is read, no memory layout inspected. Every backend says what it cannot do; the first one that can
do everything is used, and if none is left the error lists the reasons of each.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from .. import kernels
from .._checks import shown
from .._environment import read_flag, read_text
from .._tracing import can_check

_LOG = logging.getLogger("narrowcast.attention")


@dataclass(frozen=True)
class Switches:
    """The allowed kernels, as read from ``NARROWCAST_*``.

    Args:
        flash: FLASH_ATTN, flash kernels.
        fused: FUSED_ATTN, others that keep no scores in memory: cuDNN's, the memory-efficient ones, FlexAttention.
        unfused: UNFUSED_ATTN, those that do.
        nondeterministic: ALLOW_NONDETERMINISTIC_ALGO, gradients whose last bits change from run to run.
        debug: 0; with DEBUG=1, DEBUG_LEVEL: 1 logs the choices of eager code, 2 also why others were refused.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    nondeterministic: bool = True
    debug: int = field(default=0, compare=False)

    @classmethod
    def from_environment(cls) -> Switches:
        """Read the variables; by default all backends are on, and nothing is logged.

        Raises:
            ValueError: a DEBUG_LEVEL that is no number.
        """
        level = read_text("DEBUG_LEVEL", "1")
        if not level.isdigit():
            raise ValueError(f"environment variable NARROWCAST_DEBUG_LEVEL is {shown(level)}; use 0, 1 or 2")
        return cls(
            flash=read_flag("FLASH_ATTN", True),
            fused=read_flag("FUSED_ATTN", True),
            unfused=read_flag("UNFUSED_ATTN", True),
            nondeterministic=read_flag("ALLOW_NONDETERMINISTIC_ALGO", True),
            debug=int(level) if read_flag("DEBUG") else 0,
        )


class Facts(NamedTuple):
    """The properties of a call that select a backend.

    Args:
        cuda: tensors are on a GPU.
        dtype: of the tensors.
        dims: head dims of keys and values.
        packed: the format is thd.
        gaps: and there is padding between its sequences.
        mask: "none", "causal" (PyTorch's flag says it), "pairs" (a rule of pairs) or "tensor" (a tensor of pairs).
        from_the_end: what it counts, if anything, it counts from the last query and key of each sequence.
        bias: dtype of a bias; None without.
        alibi, sink, score_mod, dropout, max_logit: whether there is one.
        grad: whether a gradient is requested.
        score_grad: also of tensors that ``score_mod`` reads.
        batch_invariant: an output may not depend on the tokens beside it.
        lengths: queries and keys of the tensors.
        decoding: each sequence has one query, which sees keys in a KV cache by their place alone.
    """

    cuda: bool
    dtype: torch.dtype
    dims: tuple[int, int]
    packed: bool
    gaps: bool
    mask: str
    from_the_end: bool
    bias: torch.dtype | None
    alibi: bool
    sink: bool
    score_mod: bool
    dropout: bool
    max_logit: bool
    grad: bool
    score_grad: bool
    batch_invariant: bool = False
    lengths: tuple[int, int] = (0, 0)
    decoding: bool = False


_DEPENDS_ON_BATCH = "it chooses the order of sums by the sizes, and the mode is 'batch-invariant'"


def is_cudnn_safe(facts: Facts) -> bool:
    """Return whether cuDNN computes the gradients of this call for all values.

    If all scores of a query are below -88, its backward on Hopper gives NaN. It does not hide the second half of the
    last 128 keys (pytorch/pytorch#196678; 9.19 on an H100: with and without a mask), and from 9.25 on it fails with one
    query (NVIDIA/cudnn-frontend#1072). A causal mask hides those keys.
    """
    if not (facts.cuda and facts.grad):
        return True
    queries, keys = facts.lengths
    if facts.mask == "causal" and queries <= keys:
        return True
    return queries != 1 and keys % 128 != 64


def sdpa_kernels(facts: Facts, switches: Switches) -> list[SDPBackend]:
    """Return the kernels that PyTorch may choose from; it looks at shapes and devices itself."""
    kernels = []
    exact = switches.nondeterministic or not (facts.cuda and facts.grad)
    if (
        switches.flash
        and exact
        and not (facts.cuda and (facts.mask in ("pairs", "tensor") or facts.bias is not None))
    ):
        kernels.append(SDPBackend.FLASH_ATTENTION)
    if switches.fused and exact and facts.cuda:
        kernels += [SDPBackend.CUDNN_ATTENTION] if is_cudnn_safe(facts) else []
        kernels.append(SDPBackend.EFFICIENT_ATTENTION)
    if switches.unfused:
        kernels.append(SDPBackend.MATH)
    return kernels


def _refused_by_sdpa(facts: Facts, switches: Switches) -> list[str]:
    reasons = [_DEPENDS_ON_BATCH] if facts.batch_invariant else []
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


def _refused_by_flash_varlen(facts: Facts, switches: Switches) -> list[str]:
    reasons = [] if switches.flash else ["NARROWCAST_FLASH_ATTN is 0"]
    if facts.batch_invariant:
        reasons.append(_DEPENDS_ON_BATCH)
    if not switches.nondeterministic and facts.grad:
        reasons.append(
            "the last bits of its gradients change, and NARROWCAST_ALLOW_NONDETERMINISTIC_ALGO is 0"
        )
    if not facts.packed:
        reasons.append("it takes qkv_format='thd' only")
    if not facts.cuda or facts.dtype == torch.float32:
        reasons.append("it takes fp16 and bf16 on a GPU only")
    if facts.dims[0] != facts.dims[1] or facts.dims[0] % 8 or facts.dims[0] > 256:
        reasons.append("it takes equal head dims up to 256, multiples of 8")
    if facts.gaps:
        reasons.append("it takes no padding between sequences")
    if not facts.from_the_end:
        reasons.append(
            "it counts from the last query and key of a sequence, and queries and keys do not share one cu_seqlens"
        )
    if facts.alibi or facts.score_mod or facts.sink or facts.dropout or facts.max_logit:
        reasons.append("it has neither ALiBi, score_mod, sinks, dropout nor the largest logit")
    return reasons


def _refused_by_flex(facts: Facts, switches: Switches) -> list[str]:
    reasons = [] if switches.fused else ["NARROWCAST_FUSED_ATTN is 0"]
    if facts.batch_invariant:
        reasons.append(_DEPENDS_ON_BATCH)
    if not facts.cuda:
        reasons.append("it has no backward on a CPU")
    if min(facts.dims) < 16:
        reasons.append("it takes head dims from 16 on")
    if facts.bias is not None:
        reasons.append("it takes biases as a score_mod only")
    if facts.dropout:
        reasons.append("it has no dropout")
    if facts.score_grad and not switches.nondeterministic:
        reasons.append(
            "it sums gradients of score_mod_tensors in any order, and "
            "NARROWCAST_ALLOW_NONDETERMINISTIC_ALGO is 0"
        )
    return reasons


def _refused_by_decode(facts: Facts, switches: Switches) -> list[str]:
    reasons = [] if switches.fused else ["NARROWCAST_FUSED_ATTN is 0"]
    if facts.batch_invariant:
        reasons.append(_DEPENDS_ON_BATCH)
    if not facts.decoding:
        reasons.append("it takes one query per sequence, and a KV cache")
    if not (facts.cuda and kernels.AVAILABLE) or facts.dtype == torch.float32:
        reasons.append("it takes fp16 and bf16 on a GPU with Triton only")
    if max(facts.dims) > 128:
        reasons.append("it takes head dims up to 128")
    if facts.alibi or facts.bias is not None or facts.score_mod or facts.dropout or facts.max_logit:
        reasons.append("it has neither ALiBi, a bias, score_mod, dropout nor the largest logit")
    if facts.grad:
        reasons.append("it has no backward")
    return reasons


def _refused_by_unfused(facts: Facts, switches: Switches) -> list[str]:
    reasons = [] if switches.unfused else ["NARROWCAST_UNFUSED_ATTN is 0"]
    if facts.batch_invariant and facts.packed:
        reasons.append(
            "it sums from the first token of a pack, and the mode is 'batch-invariant': give sequences as bshd, "
            "padded at the end"
        )
    return reasons


_REFUSALS = {
    "decode": _refused_by_decode,
    "flash_varlen": _refused_by_flash_varlen,
    "flex": _refused_by_flex,
    "sdpa": _refused_by_sdpa,
    "unfused": _refused_by_unfused,
}


def _order(facts: Facts, switches: Switches) -> tuple[str, ...]:
    """Return PyTorch's kernels first, but where they would need a tensor of all pairs that a rule says, keep all
    scores, or read all of a KV cache.
    """
    if facts.decoding:
        return ("decode", "sdpa", "flex", "unfused")
    in_memory = facts.cuda and sdpa_kernels(facts, switches) in ([], [SDPBackend.MATH])
    if facts.mask == "pairs" or in_memory:
        return ("flash_varlen", "flex", "sdpa", "unfused")
    return ("sdpa", "flash_varlen", "flex", "unfused")


def choose_backend(facts: Facts, switches: Switches) -> str:
    """Return the first backend that can do it.

    Raises:
        ValueError: none can; the message has the reasons of each.
    """
    refused = []
    for name in _order(facts, switches):
        reasons = _REFUSALS[name](facts, switches)
        if not reasons:
            if switches.debug and can_check():
                why = f"; refused {'. '.join(refused)}" if refused and switches.debug > 1 else ""
                kernels = [kernel.name for kernel in sdpa_kernels(facts, switches)] if name == "sdpa" else []
                _LOG.info("attention by %s%s (%s)", " ".join((name, *kernels)), why, facts)
            return name
        refused.append(f"{name}: {'; '.join(reasons)}")
    remedy = "" if switches.unfused else "; set NARROWCAST_UNFUSED_ATTN=1 and make the module again"
    raise ValueError(f"no attention backend is left for this call ({'. '.join(refused)}){remedy}")
