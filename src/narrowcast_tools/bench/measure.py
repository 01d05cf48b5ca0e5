"""Measurements of bf16, the recipes of this package, and the installed packages."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowcast import nn as own_layers
from narrowcast.layers import set_recipe
from narrowcast.recipe import NAMES, Recipe

from . import asked
from .asked import Work
from .works import Step, build, step_of

RECIPES: dict[str, Callable[..., Recipe]] = {name: NAMES[name] for name in asked.RECIPES}
SECONDS = 0.25  # seconds of a round
ROUNDS = 5
MIB = 2**20


class Result(NamedTuple):
    """A contender's step.

    ``ms``, ``low``, ``high``: median, shortest and longest round. ``share``: of the time of bf16 in `reference_mode`.
    ``memory``: MiB at the peak, weights and optimizer included; None on a CPU. ``note``: why there is no time.
    """

    work: str
    contender: str
    mode: str
    ms: float | None
    share: float | None
    memory: float | None
    note: str = ""
    low: float | None = None
    high: float | None = None


class Contender(NamedTuple):
    """``layers``, ``head``: as ``build`` takes them. ``prepare``: done to the module. ``around``: entered by each step.
    ``optimizer``: of ``works.OPTIMIZERS``."""

    name: str
    mode: str
    layers: Any
    prepare: Callable[[nn.Module], Any] = lambda module: module
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer: str = "AdamW"
    head: Recipe | None = None


def contenders(
    recipes: Sequence[str],
    modes: Sequence[str],
    emulate: bool,
    optimizer: str = "AdamW",
    head: str = "bf16",
) -> Iterator[Contender]:
    """Yield bf16 in `reference_mode`, which the others are compared with; bf16 in the other modes; this package; and
    installed others, of which compiled ones are left out beside eager bf16.

    Args:
        recipes: names in ``RECIPES``.
        modes: names in ``MODES``.
        emulate: GEMMs without hardware.
        optimizer: of models under a recipe; the others have PyTorch's AdamW.
        head: "bf16", or the recipe of the head of models under a recipe.
    """
    for mode in dict.fromkeys((reference_mode(modes), *modes)):
        yield Contender("bf16", mode, None)
    own: dict[str, Any] = {"optimizer": optimizer}
    own["head"] = None if head == "bf16" else RECIPES[head](emulate=emulate)
    suffix = f", {optimizer}" if optimizer != "AdamW" else ""
    suffix += f", head in {head}" if head != "bf16" else ""
    for name in recipes:
        recipe = RECIPES[name](emulate=emulate)
        for mode in modes:
            prepare = lambda module, r=recipe: set_recipe(module, r)  # noqa: E731
            yield Contender(name + suffix, mode, own_layers, prepare, **own)
    if _installed("torchao.float8") and reference_mode(modes) != "eager":
        for name in ("tensorwise", "rowwise"):
            yield Contender(
                f"torchao {name}", "compiled", None, lambda module, n=name: _by_torchao(module, n)
            )
    if _installed("transformer_engine.pytorch"):
        yield from _of_transformer_engine(recipes)
    if _installed("liger_kernel.transformers"):
        yield Contender("Liger, bf16", "eager", None, _by_liger)


def reference_mode(modes: Sequence[str]) -> str:
    """Return the mode of the bf16 that times are compared with: compiled, or the first one if that is not asked for."""
    return "compiled" if "compiled" in modes or not modes else modes[0]


_WAYS: tuple[Callable[[nn.Module], Any], ...] = (
    lambda module: module,
    lambda module: torch.compile(module, fullgraph=True),
    lambda module: torch.compile(module, fullgraph=True, mode="reduce-overhead"),
)
MODES = dict(zip(asked.MODES, _WAYS))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _by_torchao(module: nn.Module, name: str) -> nn.Module:
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(name)
    if isinstance(module, nn.Linear):  # torchao replaces modules inside another module
        module = nn.Sequential(module)
    float8.convert_to_float8_training(module, config=config, module_filter_fn=lambda _, at: at != "loss.head")
    return module


def _of_transformer_engine(recipes: Sequence[str]) -> Iterator[Contender]:
    layers: Any = importlib.import_module("transformer_engine.pytorch")
    module: Any = importlib.import_module("transformer_engine.common.recipe")
    for name in recipes:
        recipe = getattr(module, RECIPES[name].__name__)()  # theirs have the same names
        around = lambda r=recipe: layers.fp8_autocast(enabled=True, fp8_recipe=r)  # noqa: E731
        yield Contender(f"TE {name}", "eager", layers, around=around)


def _by_liger(module: nn.Module) -> nn.Module:
    """Return the plain modules with Liger's SwiGLU and norm."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    silu_mul: Any = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    for parent in list(module.modules()):
        if hasattr(parent, "up") and hasattr(parent, "down"):
            parent.forward = lambda x, m=parent: m.down(silu_mul.apply(*m.up(m.norm(x)).chunk(2, -1)))  # type: ignore[method-assign]
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm):
                norm = liger.LigerRMSNorm(child.weight.shape[0]).to(child.weight)
                setattr(parent, name, norm)
    return module


def measure(work: Work, contender: Contender, device: str) -> Result:
    """Time a contender's step on a work, and its memory; no share yet. What fails is a result with the reason."""
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    torch.compiler.reset()
    named = work.name, contender.name, contender.mode
    try:
        rounds = _rounds(_step(work, contender, device), device)
    except Exception as error:  # another package's, too: a contender that cannot run is no reason to stop
        first = next(iter(str(error).splitlines()), "")
        return Result(*named, None, None, None, f"{type(error).__name__}: {first[:100]}")
    memory = (torch.cuda.max_memory_allocated() - before) / MIB if device == "cuda" else None
    return Result(*named, statistics.median(rounds), None, memory, "", min(rounds), max(rounds))


def _step(work: Work, contender: Contender, device: str) -> Step:
    module = contender.prepare(build(work, contender.layers, device, contender.head))
    run = MODES[contender.mode](module)

    def forward(*given: Any) -> Any:
        with contender.around():
            return run(*given)

    step = step_of(work, module, forward, device, contender.optimizer)
    if contender.mode != "graphs":
        return step

    def replay() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step()

    return replay


def _rounds(step: Step, device: str) -> list[float]:
    """Return a step's milliseconds in each round, steps issued one after the other, CPU time included."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(4):
        step()
    wait()

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count

    count = max(1, min(int(SECONDS / timed(1)), 200))
    return [1e3 * timed(count) for _ in range(ROUNDS)]
