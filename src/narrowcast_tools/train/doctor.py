"""The work of ``doctor``: formats that this machine runs natively or emulates, and the versions found.

It needs no package of the extra ``train``, whose absence it reports.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from json import dumps

import torch

import narrowcast as nc
from narrowcast._installed import gpu_standing, installed, sm, versions
from narrowcast.upstream.versions import GPUS, OLDEST_TORCH

from .machine import cpu_model
from .recipes import CHOICES, RecipeChoice

NEVER_RUN = ("mxfp8", "nvfp4")
"""Recipes whose native GEMM was written without a GPU that has it."""
PACKAGES = ("safetensors", "rich", "typer", "matplotlib")
EMULATED = "emulated"
ABSENT = "not installed; the other commands need it: pip install 'narrowcast[train]'"


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Args:
        broken: whether training cannot work because of it.
    """

    subject: str
    text: str
    broken: bool = False


def doctor(json: bool) -> int:
    """Run `narrowcast doctor`; return its exit code."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not json:  # one by one: the later ones take a while
            _show(finding.subject, finding.text)
    healthy = not any(finding.broken for finding in findings)
    if json:
        print(dumps({"healthy": healthy, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        _show("verdict", _verdict(findings) if healthy else "something above is broken")
    return 0 if healthy else 1


def _show(subject: str, text: str) -> None:
    """Print a finding, in a terminal with the lines that continue it below its text."""
    begin = f"{subject:<12} "
    line = begin + text
    if sys.stdout.isatty():
        columns = max(shutil.get_terminal_size().columns, 40)
        line = textwrap.fill(line, columns, subsequent_indent=len(begin) * " ", break_on_hyphens=False)
    print(line, flush=True)


def _verdict(findings: list[Finding]) -> str:
    recipes = [finding for finding in findings if finding.subject in CHOICES and finding.subject != "bf16"]
    if all(finding.text.startswith(EMULATED) for finding in recipes):
        return "this machine can train, by emulation only: it shows losses, and no recipe is faster than bf16"
    return "this machine can train"


def examine() -> Iterator[Finding]:
    """Yield the findings, quick ones first; each recipe is tried with a small forward and backward pass."""
    for name, text in versions().items():
        yield _torch(text) if name == "torch" else Finding(name, text)
    for name in PACKAGES:
        yield Finding(name, installed(name) or ABSENT)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield Finding("device", _device(device))
    for capability, names in GPUS.items():
        yield Finding(sm(capability), f"{names}: {gpu_standing(capability)}")
    for name, choice in CHOICES.items():
        yield _try_recipe(name, choice, device)


def _torch(text: str) -> Finding:
    oldest = _minor(OLDEST_TORCH)
    if _minor(torch.__version__) < oldest:
        text = f"{torch.__version__}: too old, install torch {oldest[0]}.{oldest[1]} or newer"
        return Finding("torch", text, broken=True)
    return Finding("torch", text)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _device(device: str) -> str:
    if device == "cpu":
        return f"cpu: {cpu_model()}, torch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    capability = torch.cuda.get_device_capability()
    return f"cuda: {torch.cuda.get_device_name()}, {sm(capability)}: {gpu_standing(capability)}"


def _try_recipe(name: str, choice: RecipeChoice, device: str) -> Finding:
    recipe, how = None, "native"
    if choice.recipe is not None:
        native, reason = choice.availability()
        how = "native" if native else f"{EMULATED}: {reason}"
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
    x = torch.linspace(-1, 1, 32 * 64, dtype=torch.float32, device=device).view(32, 64).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), nc.autocast(enabled=recipe is not None, recipe=recipe):
        loss = layer(x).float().square().mean()
    loss.backward()
    if not all(torch.isfinite(g).all() for g in (loss, x.grad, layer.weight.grad) if g is not None):
        raise ArithmeticError("a 64 x 64 layer gave a loss or gradient that is not finite")
