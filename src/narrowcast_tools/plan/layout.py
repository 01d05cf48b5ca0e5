"""The search for a layout: one that fits, simple, and as good as the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ..hardware import BATCH, BATCH_PER_GPU, RESERVE, find_gpu, find_optimizer, find_rates
from ..words import any_of
from .estimate import Estimate, Layout, check, estimate, gib
from .models import find_model

CLOSE = 0.97  # relative to the fastest: closer than the model's error, so take the simpler layout


class DoesNotFitError(ValueError):
    """No layout's memory fits; the message says how much is missing."""


def default_batch_size(gpus: int, seq_len: int) -> int:
    """Return the sequences of a step that suit so many GPUs: the same number for each, or for each few of them."""
    sequences = min(max(BATCH_PER_GPU // seq_len, 1) * gpus, max(BATCH // seq_len, 1))
    shares = (gpus // few for few in (1, 2, 4, 8, 16, 32, 64, 128) if gpus % few == 0)
    return next((sequences - sequences % share for share in shares if share <= sequences), sequences)


def plan(
    model: str,
    gpus: int,
    recipe: str = "current",
    gpu: str = "h200",
    *,
    batch_size: int | None = None,
    seq_len: int = 8192,
    tp_size: int = 0,
    pp_size: int = 0,
    ep_size: int = 0,
    recompute: bool | None = None,
    fp8_gather: bool | None = None,
    optimizer: str = "adamw",
    saved_activations: str | None = None,
    chunked_loss: bool = False,
    step_in_backward: bool = False,
) -> Estimate:
    """Return the estimate of a layout that fits; zeros and None are searched, other values are kept.

    Of the layouts within 3% of the fastest, it is the one with the fewest ranks of tensor and pipeline parallelism.
    ``batch_size`` is the sequences of a step; None takes `default_batch_size`. ``optimizer`` is a name of `OPTIMIZERS`.
    ``saved_activations`` is the recipe's; ``chunked_loss`` is `nc.linear_cross_entropy`, ``step_in_backward``
    `nc.optimizers.step_in_backward`.

    Raises:
        ValueError: an unknown name, or numbers that do not divide.
        DoesNotFitError: nothing fits.
    """
    shape, machine, _ = find_model(model), find_gpu(gpu), find_rates(recipe)
    if saved_activations not in (None, "fp8"):
        raise ValueError(f"--saved-activations is {saved_activations!r:.60}; use fp8, or leave it out")
    held = {"state": find_optimizer(optimizer), "saved_fp8": saved_activations == "fp8"}
    for name, size in (("gpus", gpus), ("seq-len", seq_len), ("batch-size", batch_size)):
        if size is not None and size < 1:
            raise ValueError(f"--{name} is {size}; it must be at least 1")
    for name, ranks in (("tp", tp_size), ("pp", pp_size), ("ep", ep_size)):
        if ranks < 0:
            raise ValueError(f"--{name}-size is {ranks}; use 1 or more, or leave it out")
    if shape.experts and not ep_size and gpus % 8:
        raise ValueError(
            f"--gpus is {gpus}; the experts of {model} are split over 8 GPUs or more: use a multiple of 8"
        )
    asked = batch_size
    if batch_size is None:
        batch_size = 1 if step_in_backward else default_batch_size(gpus, seq_len)
    gathers = fp8_gather if fp8_gather is not None else recipe != "bf16"
    held |= {"chunked_loss": chunked_loss, "step_in_backward": step_in_backward}
    base = Layout(gpus, batch_size * seq_len, seq_len, fp8_gather=gathers, **held)
    fitting: list[Estimate] = []
    smallest: Estimate | None = None
    refused = ""
    units: list[int] = []  # sequences of whose multiples a layout takes a batch
    for t, p, e, recomputes, rows in product(
        # Experts split by TP would be narrower than the rates hold for: mixtures spread over EP instead.
        [tp_size] if tp_size else ([1] if shape.experts else [1, 2, 4, 8]),
        [pp_size] if pp_size else [1, 2, 4, 8, 16],
        [ep_size] if ep_size else ([8, 16, 32, 64] if shape.experts else [1]),
        [False, True] if recompute is None else [recompute],
        [1, 2, 4],
    ):
        stages = 1 if p == 1 else max(1, min(8, shape.layers // p // 2))
        layout = replace(base, tp=t, pp=p, ep=e, stages=stages, recompute=recomputes, micro_batch=rows)
        unit = max(layout.fsdp, 1) * rows
        try:
            check(shape, replace(layout, batch=max(batch_size // unit, 1) * unit * seq_len), recipe)
        except ValueError as error:
            refused = refused or str(error)
            continue
        if batch_size % unit:
            units.append(unit)
            continue
        result = estimate(shape, layout, recipe, machine)
        if smallest is None or result.total_memory < smallest.total_memory:
            smallest = result
        if result.total_memory <= RESERVE * machine.memory:
            fitting.append(result)
    if fitting:
        enough = CLOSE * max(result.tokens_per_second for result in fitting)
        near = [result for result in fitting if result.tokens_per_second >= enough]
        return min(near, key=lambda e: (e.layout.tp * e.layout.pp, e.layout.pp, e.layout.recompute, e.step))
    if smallest is None and units:
        unit = min(units)
        sizes = [size for size in (batch_size // unit * unit, (batch_size // unit + 1) * unit) if size]
        of_default = f"--gpus is {gpus:,}; no such layout divides its default --batch-size {batch_size:,}"
        told = (
            f"--batch-size is {asked:,}; no such layout of --gpus {gpus:,} divides it"
            if asked
            else of_default
        )
        raise ValueError(f"{told}; use --batch-size {any_of(sizes)}, or another multiple of {unit}")
    if smallest is None:
        raise ValueError(refused)
    room = RESERVE * machine.memory
    raise DoesNotFitError(
        f"{model} does not fit {gpus} {gpu} {'GPU' if gpus == 1 else 'GPUs'}: "
        f"the smallest layout tried ({smallest.layout}{', recomputing' if smallest.layout.recompute else ''}) "
        f"needs {gib(smallest.total_memory - room)} more than the {gib(room)} that a GPU can use"
    )
