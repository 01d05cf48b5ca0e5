"""An estimate in lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..hardware import ERROR, ERROR_DENSE, ERROR_EXPERTS, GIB, HOST, MEASURED
from .estimate import Estimate

GIGA = 1e9
WORDS = {
    "logits, or a layer's": "logits or a layer's",
    "norms, activations, copies": "norms, activations and copies",
    "codes of shards": "FP8 copies for the backward",
    "gathered parameters": "whole layers' parameters",
    "full gradients": "a whole layer's gradients",
    "parameter shards": "parameters",
    "gradient shards": "gradients",
    "not at the same time": "not held at the same time",
    "FSDP all-gather": "parameters",
    "FSDP reduce-scatter": "gradients",
    "TP/SP collectives": "TP",
    "slowed by overlap": "slowed by communication",
    "exposed: ": "waiting for ",
    "pipeline bubble": "waiting for the pipeline",
}
"""Parts of a plan in plain words, by their beginnings."""


def remarks(gpus: int, batch_size: int | None) -> Iterator[str]:
    """Yield what is odd about the numbers that were asked for."""
    if gpus > HOST and gpus % HOST:
        yield (
            f"a host has {HOST} GPUs, so {gpus} leave one in part empty; the estimate takes all links as those of "
            f"whole hosts. Use --gpus {gpus - gpus % HOST} or {gpus + HOST - gpus % HOST}."
        )
    if batch_size and batch_size % gpus and gpus % batch_size:
        yield (
            f"--batch-size {batch_size} does not divide over {gpus} GPUs, which rules the simplest layouts out; a "
            f"multiple of {gpus} may be faster."
        )


def margin(gpus: int, *, experts: bool) -> str:
    """Return how far such a plan's speed was off, or what to expect where none was measured."""
    if experts:
        return ERROR_EXPERTS
    return ERROR if gpus <= MEASURED else ERROR_DENSE


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


def parts(result: Estimate) -> dict[str, str]:
    """Return memory, bytes received if any, and time of a step, by their largest parts of one GPU."""
    step, received = result.step, sum(result.wire.values())
    told = {"memory": _listed(result.memory, lambda size: f"{size / GIB:,.1f}", "GiB")}
    if received:
        told["received"] = _listed(result.wire, lambda size: f"{size / GIGA:,.1f}", "GB a step")
    return {
        **told,
        "time": _listed(result.seconds, lambda seconds: f"{100 * seconds / step:.1f}", "% of a step"),
    }


def _listed(sizes: dict[str, float], shown: Callable[[float], str], unit: str) -> str:
    """Return the parts that are not 0 when shown, largest first."""
    listed = sorted(
        ((size, name) for name, size in sizes.items() if float(shown(size).replace(",", ""))), reverse=True
    )
    return f"{unit}: " + ", ".join(f"{_worded(name)} {shown(size)}" for size, name in listed)


def _worded(name: str) -> str:
    return next(
        (words + name.removeprefix(part) for part, words in WORDS.items() if name.startswith(part)), name
    )
