"""The record of everything between the query-key product and the softmax, read by every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from .masks import Geometry, MaskRule

ScoreMod = Callable[..., Tensor]


@dataclass
class Scores:
    """score = mod(scale * q·k) + bias - slope * distance, hidden where the rule says; then softmax with a sink.

    Args:
        scale: of the products.
        rule, places: who sees whom; ``places`` is None if the rule needs none.
        masked_out: of an arbitrary mask, broadcastable to (b, h, s_q, s_kv), True where masked out.
        bias: broadcastable to (b, h, s_q, s_kv), added after scaling; None for none.
        slopes: of ALiBi, (h) or (b, h) in fp32; None for none.
        score_mod: ``score_mod(score, b, h, q, kv, **tensors)``, as FlexAttention calls it; of packed tokens b is the
            sequence, and q and kv are counted in it.
        tensors: further operands of ``score_mod``, by name.
        sink: (h) in fp32, a logit that takes part in the softmax and has no value; None for none.
        dropout: probability.
    """

    scale: float
    rule: MaskRule
    places: Geometry | None = None
    masked_out: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    score_mod: ScoreMod | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sink: Tensor | None = None
    dropout: float = 0.0
