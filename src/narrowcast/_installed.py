"""Installed packages and whether narrowcast was tested with them, for ``narrowcast doctor`` and bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Collection

import torch

from . import _environment as environment
from ._version import __version__
from .upstream.versions import COMPILED, GPU_TESTS, TESTED_PYTHON, TESTED_TORCH, TESTED_TRITON

VARIABLES = (
    "CUDA",
    "INDUCTOR",
    "NARROWCAST",
    "NCCL",
    "NVTE",
    "OMP",
    "PYTORCH",
    "TORCH",
    "TORCHINDUCTOR",
    "TRITON",
)
"""First words of the environment variables that matter: ``NARROWCAST_INLINE``, ``CUDA_VISIBLE_DEVICES``."""

ONLY_COMPILED = "every kernel compiles, never run"


def minor(version: str) -> str:
    """Return the minor release of a version: ``"2.15"`` of ``"2.15.1+cu132"``, "" of a development build."""
    found = re.fullmatch(r"(\d+\.\d+)(\.\d+)?(\+.*)?", version)
    return found[1] if found else ""


def with_standing(version: str, releases: Collection[str], on_gpus: Collection[str] | None = None) -> str:
    """Return ``version`` with whether its minor release was tested.

    Args:
        version: as the package gives it; a development build counts as not tested.
        releases: those that were tested, oldest first.
        on_gpus: those that were tested on a GPU; None if a GPU makes no difference.
    """
    minors = [minor(release) for release in releases]
    if minor(version) not in minors:
        return f"{version}: not tested; {minors[0]} to {minors[-1]} were"
    if on_gpus is None:
        return f"{version}: tested"
    there = "on GPUs" if minor(version) in map(minor, on_gpus) else "not on GPUs"
    return f"{version}: tested on CPUs, {there}"


def versions() -> dict[str, str]:
    """Return the versions of Python, PyTorch and Triton, each with whether it was tested."""
    triton = installed("triton")
    return {
        "python": with_standing(platform.python_version(), TESTED_PYTHON),
        "torch": with_standing(torch.__version__, TESTED_TORCH, [run["torch"] for run in GPU_TESTS.values()]),
        "narrowcast": __version__,
        "triton": with_standing(triton, TESTED_TRITON, [run["triton"] for run in GPU_TESTS.values()])
        if triton
        else "not installed; the reference numerics run instead",
    }


def installed(name: str) -> str:
    """Return the version of an installed package, "" if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def sm(capability: tuple[int, int]) -> str:
    """Return a compute capability as compilers name it: ``"sm_90"``."""
    return f"sm_{capability[0]}{capability[1]}"


def gpu_standing(capability: tuple[int, int]) -> str:
    """Return what was tried on GPUs of a compute capability: the last GPU tests, or what stands for them."""
    if capability in GPU_TESTS:
        run = GPU_TESTS[capability]
        return (
            f"GPU tests on {run['gpu']}, PyTorch {run['torch']}, Triton {run['triton']}, {run['date']}, "
            f"commit {run['commit']}: {run['passed']} passed, {run['failed']} failed, {run['not run']} not run"
        )
    return ONLY_COMPILED if capability in COMPILED else "not tried"


def show_versions() -> None:
    """Print the versions, the GPUs and the environment variables that matter. Paste it into a bug report."""
    facts = versions()
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    facts["cuda"] = torch.version.cuda or "a build without CUDA"
    if torch.cuda.is_available():
        facts["cudnn"] = str(torch.backends.cudnn.version())
        for index in range(torch.cuda.device_count()):
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            facts[f"gpu {index}"] = f"{name}, {sm(capability)}: {gpu_standing(capability)}"
    else:
        facts["gpu"] = "none that torch sees"
    facts.update(environment.read_by_first_word(VARIABLES))
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
