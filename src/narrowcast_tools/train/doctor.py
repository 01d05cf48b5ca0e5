"""The work of ``doctor``: formats that this machine runs natively or emulates, and the versions found.

It needs no package of the extra ``train``, whose absence it reports.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from json import dumps

import torch

import narrowcast as nc
from narrowcast._installed import ONLY_COMPILED, gpu_standing, installed, sm, versions
from narrowcast.upstream.versions import GPU_TESTS, GPUS, OLDEST_TORCH

from ..words import as_typed, pip_install, tell
from .machine import cpu_model
from .recipes import CHOICES, RecipeChoice

NEVER_RUN = ("mxfp8", "nvfp4")
"""Recipes whose native GEMM was written without a GPU that has it."""
PACKAGES = ("numpy", "safetensors", "rich", "typer", "matplotlib")
NATIVE, EMULATED = "native", "emulated"
UNTESTED = "native, but never run on such a GPU before a release"
ABSENT = f"not installed, but needed by the other commands; in the clone: {pip_install('.[train]')}"


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
    if sys.stderr.isatty() and not json:
        print("trying each recipe ...", end="\r", file=sys.stderr, flush=True)
    findings = list(examine())
    healthy = not any(finding.broken for finding in findings)
    if json:
        answers: dict[str, list[str]] = {}
        for subject, text in _answers(findings):
            answers.setdefault(subject, []).append(text)
        content = {"healthy": healthy, "answers": answers, "findings": [asdict(f) for f in findings]}
        print(dumps(content, indent=1))
    else:
        for subject, text in (*_answers(findings), ("", ""), *_details(findings)):
            tell(subject, text)
    return 0 if healthy else 1


def _answers(findings: list[Finding]) -> Iterator[tuple[str, str]]:
    """Yield what works here, what is wrong, what is missing, and what to do. A healthy machine has nothing wrong."""
    recipes = [finding for finding in findings if finding.subject in CHOICES]
    slow = all(one.text.startswith(EMULATED) for one in recipes if one.subject != "bf16")
    wrong = [f"{one.subject}: {one.text}" for one in findings if one.broken]
    absent = ", ".join(one.subject for one in findings if one.text == ABSENT)
    limits = [f"{absent}: {ABSENT}"] if absent else []
    limits += [f"{one.subject} {one.text}" for one in findings if ": not tested;" in one.text]
    verdict = "this machine can train"
    if any(one.broken for one in findings):
        verdict = "something here is broken"
    elif slow:
        verdict += ", by emulation only: it shows losses, and no recipe is faster than bf16"
        limits.append(f"no GPU with FP8 is visible to torch {torch.__version__}")
    yield "verdict", verdict
    for kind, begins in (("native", NATIVE), ("untested", UNTESTED), ("emulated", EMULATED)):
        names = [one.subject for one in recipes if one.text.split(":")[0] == begins]
        if names:
            yield kind, ", ".join(names)
    for text in wrong or ["nothing"]:
        yield "wrong", text
    for text in limits:
        yield "limits", text
    try_it = f"try: {as_typed('narrowcast demo --quick')}"
    yield "to do", f"{try_it}; for speed, use an NVIDIA GPU with FP8, such as an H100" if slow else try_it


def _details(findings: list[Finding]) -> Iterator[tuple[str, str]]:
    """Yield versions, the device, and on which GPUs the library ran."""
    packages = [
        f"{one.subject} {one.text}" for one in findings if one.subject in PACKAGES and one.text != ABSENT
    ]
    for one in findings:
        if one.subject in ("python", "torch", "narrowcast", "triton", "device"):
            yield one.subject, one.text
    if packages:
        yield "packages", ", ".join(packages)
    for capability, run in GPU_TESTS.items():
        counts = f"{run['passed']} passed, {run['failed']} failed, {run['not run']} not run"
        yield "GPU tests", f"{sm(capability)}, {run['gpu']}, PyTorch {run['torch']}, {run['date']}: {counts}"
    compiled = ", ".join(sm(capability) for capability in GPUS if gpu_standing(capability) == ONLY_COMPILED)
    yield "not run on", f"{compiled} (every kernel compiles for them)"


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
    yield from _environment()
    for name, choice in CHOICES.items():
        yield _try_recipe(name, choice, device)


def _environment() -> Iterator[Finding]:
    """Yield what is wrong with the variables that recipes read."""
    wrong: dict[str, None] = {}
    for choice in CHOICES.values():
        try:
            if choice.recipe is not None:
                choice.recipe()
        except ValueError as error:
            wrong[str(error)] = None
    for text in wrong:
        yield Finding("environment", text.removeprefix("environment "), broken=True)


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
    recipe, how = None, NATIVE
    if choice.recipe is not None:
        native, reason = choice.availability()
        how = NATIVE if native else f"{EMULATED}: {reason}"
        if native and name in NEVER_RUN:
            how = f"{UNTESTED}: compare with emulate=True first"
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
