"""The health of routers, as a watch samples it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .._table import aligned


@dataclass(frozen=True)
class RouterRecord:
    """A router, or converted experts, in one step; NaN for what is not known there.

    Attributes:
        load_entropy: entropy of the experts' shares of the copies over that of equal shares; 1 is balanced.
        max_load: the largest share over an equal share; 1 is balanced.
        dropped: share of the copies that a capacity dropped.
        bias_min, bias_max: the range of the biases of the choice.
        z: mean of ``logsumexp(logits) ** 2`` over the tokens.
    """

    step: int
    router: str
    load_entropy: float
    max_load: float
    dropped: float
    bias_min: float
    bias_max: float
    z: float


def table_of(records: list[RouterRecord]) -> list[str]:
    """Return the lines of a table; "-" for what is not known."""
    rows = [tuple(field.name for field in fields(RouterRecord))]
    for one in records:
        step, router, *values = vars(one).values()
        rows.append((str(step), router, *("-" if math.isnan(value) else f"{value:.4g}" for value in values)))
    return aligned(rows, frozenset((0, *range(2, 8))))
