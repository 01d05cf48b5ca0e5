"""Speed of a run, and its use of the machine."""

from dataclasses import dataclass

from .config import TrainConfig
from .flops import flops_per_token, peak_flops
from .machine import peak_memory


@dataclass(frozen=True)
class Pace:
    """The speed of a run, and its use of the machine.

    Args:
        tokens_per_second: without evaluation and first step; 0 before anything was timed.
        mfu: model FLOPs utilization: the operations of the model's shape, as a share of the GPU's peak in
            dense bfloat16 whatever the recipe, so that recipes compare; None if that peak is not known.
        memory: most bytes in use by this process so far: allocated on a GPU, resident on a CPU; 0 if unknown.
    """

    tokens_per_second: float
    mfu: float | None = None
    memory: int = 0


def measure(config: TrainConfig, tokens_per_second: float, ranks: int = 1) -> Pace:
    """Return the pace of a run that does so many tokens per second on so many GPUs like this one."""
    peak = peak_flops(config.device)
    flops = flops_per_token(config.model, config.seq_len) * tokens_per_second
    return Pace(
        tokens_per_second, flops / (peak * ranks) if peak and flops else None, peak_memory(config.device)
    )


def format_pace(pace: Pace, separator: str = "  ") -> str:
    """Return such as `12,346 tok/s  3.2 GiB  MFU 41.0%`, without an unknown MFU; nothing before anything was timed."""
    if not pace.tokens_per_second:
        return ""
    mfu = [] if pace.mfu is None else [f"MFU {pace.mfu:.1%}"]
    parts = (f"{pace.tokens_per_second:,.0f} tok/s", f"{pace.memory / 2**30:.1f} GiB", *mfu)
    return separator.join(parts)
