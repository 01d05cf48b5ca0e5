"""An estimate in lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import ERROR, ERROR_DENSE, ERROR_EXPERTS, GIB, HOST, MEASURED
from .estimate import Estimate

GIGA = 1e9
TIGHT = 0.03  # share of the usable memory: an estimate that leaves less may fail
WORDS = {
    "logits, or a layer's gradients": "logits or activation gradients",
    "norms, activations, copies": "norms, activations and copies",
    "codes of shards": "FP8 copies for the backward",
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
    pipeline = result.layout.pp > 1  # whose ranks hold all their layers unsharded for a whole step
    names = {
        "gathered parameters": "all layers' gathered parameters"
        if pipeline
        else "two layers' gathered parameters",
        "full gradients": "all layers' unsharded gradients"
        if pipeline
        else "one layer's unsharded gradients",
    }
    memory = {names.get(name, name): size for name, size in result.memory.items()}
    told = {"memory": _listed(memory, *((GIB, "GiB") if result.total_memory >= GIB else (GIB / 1024, "MiB")))}
    if received:
        told["received"] = _listed(
            result.wire, *((GIGA, "GB a step") if received >= GIGA else (GIGA / 1000, "MB a step"))
        )
    return {**told, "time": _listed(result.seconds, step / 100, "% of a step")}


def duration(seconds: float) -> str:
    """Return the seconds of a step, in milliseconds if they are few."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _listed(sizes: dict[str, float], one: float, unit: str) -> str:
    """Return the parts that are not 0 when shown, largest first. ``one``: the size of a unit."""
    shown = {name: f"{size / one:,.1f}" for name, size in sizes.items()}
    names = sorted(
        (name for name in sizes if float(shown[name].replace(",", ""))), key=lambda name: -sizes[name]
    )
    return f"{unit}: " + ", ".join(f"{_worded(name)} {shown[name]}" for name in names)


def _worded(name: str) -> str:
    return next(
        (words + name.removeprefix(part) for part, words in WORDS.items() if name.startswith(part)), name
    )
