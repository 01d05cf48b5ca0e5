"""The options that alone make a plan fit that does not."""

from __future__ import annotations

from typing import Any

from ..hardware import find_optimizer
from ..words import any_of
from .estimate import Estimate, gib
from .layout import plan

SMALL = "fused-int8"  # the optimizer with fp32 masters that holds least
MOST, SHORTEST = 4096, 1024  # GPUs and tokens of a sequence that are tried


def roomier(tight: Estimate, most: float, model: str, gpus: int, recipe: str, gpu: str, **layout: Any) -> str:
    """Return what makes room for a plan that only just fits: recomputing, and its cost, or more GPUs.

    Args:
        tight: the plan.
        most: bytes that leave room.
        layout: the further arguments of :func:`narrowcast_tools.plan.plan`.
    """
    if layout["recompute"] is None and not tight.layout.recompute:
        layout |= {"recompute": True, "batch_size": tight.layout.batch // tight.layout.length}
        found = plan(model, gpus, recipe, gpu, **layout)
        if found.total_memory <= most:
            times = found.tokens_per_second / tight.tokens_per_second
            return f"--recompute needs {gib(found.total_memory)}, at {times:.2f} times the speed"
    return "more --gpus make room"


def remedies(model: str, gpus: int, recipe: str, gpu: str, **layout: Any) -> str:
    """Return what suffices alone: fewer fixed options, the fewest GPUs, or another value of one option.

    Args:
        layout: the further arguments of :func:`narrowcast_tools.plan.plan`.
    """

    def fits(**changes: Any) -> bool:
        try:
            plan(**{"model": model, "gpus": gpus, "recipe": recipe, "gpu": gpu, **layout, **changes})
        except ValueError:
            return False
        return True

    found = []
    sizes = {name: 0 for name in ("tp_size", "pp_size", "ep_size") if layout[name]}
    fixed: dict[str, int | None] = {**sizes, **({"recompute": None} if layout["recompute"] is False else {})}
    if fixed and fits(**fixed):
        names = ("--no-recompute" if name == "recompute" else f"--{name.replace('_', '-')}" for name in fixed)
        found.append(f"leave {' and '.join(names)} out")
    counts = [2**power for power in range(MOST.bit_length()) if 2**power > gpus]
    fewest = next((count for count in counts if fits(gpus=count)), None)
    uses = [f"--gpus {fewest}"] if fewest else []
    if sum(find_optimizer(layout["optimizer"])) > sum(find_optimizer(SMALL)) and fits(optimizer=SMALL):
        uses.append(f"--optimizer {SMALL}")
    if not layout["saved_activations"] and recipe != "bf16" and fits(saved_activations="fp8"):
        uses.append("--saved-activations fp8")
    powers = range((layout["seq_len"] - 1).bit_length() - 1, SHORTEST.bit_length() - 2, -1)
    longest = next((2**power for power in powers if fits(seq_len=2**power)), None)
    uses += [f"--seq-len {longest}"] if longest else []
    if uses:
        found.append(f"use {any_of(uses)}")
    return any_of(found) if found else f"no other option alone suffices, nor does --gpus up to {MOST:,}"
