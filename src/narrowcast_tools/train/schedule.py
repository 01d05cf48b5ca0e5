"""Learning rate."""

import math

FLOOR = 0.1  # the cosine ends at this share of the peak


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, from 0: linear warmup, then a cosine down to `FLOOR` of the peak.

    Args:
        warmup: steps of warmup; the first step already has a rate above 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
