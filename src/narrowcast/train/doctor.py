"""What this machine runs natively, what it would emulate, and which versions it found."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import narrowcast as nc

from .._version import __version__
from .machine import cpu_model
from .recipes import CHOICES, RecipeChoice

OLDEST_TORCH = (2, 11)
NEVER_RUN = ("mxfp8", "nvfp4")
"""Recipes whose native GEMM was written without a GPU that has it."""
PACKAGES = ("triton", "safetensors", "rich", "typer", "matplotlib")


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Args:
        broken: whether training cannot work because of it.
    """

    subject: str
    text: str
    broken: bool = False


def examine() -> Iterator[Finding]:
    """Yield the findings, quick ones first; each recipe is tried with a small forward and backward pass."""
    yield Finding("python", platform.python_version())
    yield _torch()
    yield Finding("narrowcast", __version__)
    for name in PACKAGES:
        yield Finding(name, _version(name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield Finding("device", _device(device))
    for name, choice in CHOICES.items():
        yield _try_recipe(name, choice, device)


def _torch() -> Finding:
    oldest = ".".join(map(str, OLDEST_TORCH))
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST_TORCH:
        return Finding("torch", f"{torch.__version__}: too old, install torch {oldest} or newer", broken=True)
    return Finding("torch", torch.__version__)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" + ("; the reference numerics run instead" if name == "triton" else "")


def _device(device: str) -> str:
    if device == "cpu":
        return f"cpu: {cpu_model()}, torch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda: {torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _try_recipe(name: str, choice: RecipeChoice, device: str) -> Finding:
    recipe, how = None, "native"
    if choice.recipe is not None:
        native, reason = choice.availability()
        how = "native" if native else f"emulated: {reason}"
        if native and name in NEVER_RUN:
            how = "native, but never run on such a GPU before a release: compare with emulate=True first"
        recipe = choice.recipe(emulate=not native)
    try:
        _one_step(recipe, device)
    except Exception as error:  # whatever it is, the user wants it as a line of this report
        first_line = (str(error).splitlines() or [""])[0]
        return Finding(name, f"broken: {type(error).__name__}: {first_line}", broken=True)
    return Finding(name, how)


def _one_step(recipe: nc.recipe.Recipe | None, device: str) -> None:
    layer = nc.Linear(64, 64, bias=False, device=device)
    x = torch.linspace(-1, 1, 32 * 64, device=device).view(32, 64).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), nc.autocast(enabled=recipe is not None, recipe=recipe):
        loss = layer(x).float().square().mean()
    loss.backward()
    if not all(torch.isfinite(g).all() for g in (loss, x.grad, layer.weight.grad) if g is not None):
        raise ArithmeticError("a 64 x 64 layer gave a loss or gradient that is not finite")
