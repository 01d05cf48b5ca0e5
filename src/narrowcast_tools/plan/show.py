"""An estimate as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from ..hardware import ERROR, ERROR_DENSE, ERROR_EXPERTS, HOST, MEASURED
from ..tables import make_table
from .estimate import Estimate, gib

GIGA = 1e9
TERMS = {
    "codes of shards": "FP8 copies that the backward gathers again",
    "not at the same time": "gradients come as activations go, so the smaller of the two is subtracted",
    "exposed": "communication that no computation hides",
    "pipeline bubble": "a rank that waits for the others of its pipeline",
}
"""Parts of a plan whose names do not say what they are, by their beginnings."""


def remark(gpus: int) -> str:
    """Return which part of a host's GPUs a plan leaves out; "" for whole hosts and for less than one."""
    if gpus < HOST or gpus % HOST == 0:
        return ""
    return (
        f"a host has {HOST} GPUs, so {gpus} leave one in part empty; the estimate takes all links as those of "
        f"whole hosts. Use --gpus {gpus - gpus % HOST} or {gpus + HOST - gpus % HOST}."
    )


def margin(gpus: int, *, experts: bool) -> str:
    """Return how far such a plan's speed was off, or what to expect where none was measured."""
    if experts:
        return ERROR_EXPERTS
    return ERROR if gpus <= MEASURED else ERROR_DENSE


def terms(result: Estimate) -> list[str]:
    """Return a line for each part of the tables that needs one."""
    parts = [name for name, value in {**result.memory, **result.seconds}.items() if value]
    return [f"{name}: {told}" for name, told in TERMS.items() if any(part.startswith(name) for part in parts)]


def described(result: Estimate) -> str:
    """Return the layout in words."""
    layout = result.layout
    return (
        f"{layout}; {layout.micro_batches} "
        f"microbatch{'es' if layout.micro_batches > 1 else ''} of {layout.micro_batch} x {layout.length} tokens"
        + (
            f", {layout.stages} pipeline stage{'s' if layout.stages > 1 else ''} per rank"
            if layout.pp > 1
            else ""
        )
        + (", FP8 gather" if layout.fp8_gather and layout.fsdp > 1 else "")
        + (", recomputing" if layout.recompute else "")
        + (", saved activations in FP8" if layout.saved_fp8 else "")
        + (", loss in chunks" if layout.chunked_loss else "")
        + (", steps in the backward" if layout.step_in_backward else "")
    )


def tables(result: Estimate) -> list[Table]:
    """Return memory, bytes received if any, and time of a step, part by part, of one GPU."""
    step, received = result.step, sum(result.wire.values())
    wire = _table("received per step", result.wire, lambda size: f"{size / GIGA:,.1f} GB", received)
    return [
        _table("memory", result.memory, gib, result.total_memory),
        *([wire] if received else []),
        _table("time of a step", result.seconds, lambda t: f"{t:,.3f} s {t / step:6.1%}", step),
    ]


def _table(name: str, parts: dict[str, float], told: Callable[[float], str], total: float) -> Table:
    table = make_table((name, "per GPU"), footers=("total", told(total)))
    for part, value in parts.items():
        if value:
            table.add_row(part, told(value))
    return table
