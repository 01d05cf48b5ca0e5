"""The machine and the versions a measurement was made with."""

import os
import platform
from pathlib import Path

import torch

from narrowcast._version import __version__

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

CPU_INFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def remark(device: str) -> str:
    """Return what is unusual about the processor that trains, or ""."""
    if device != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return ""
    return (
        "this CPU has no AVX-512, and PyTorch multiplies bfloat16 on it many times slower than float32 "
        "(pytorch/pytorch#146508): expect several times the minutes that the README names"
    )


def describe(device: str) -> dict[str, str | int]:
    """Return the facts that a table of measurements must name."""
    facts: dict[str, str | int] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "narrowcast": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def peak_memory(device: str) -> int:
    """Return the most bytes that this process had in use: allocated on the GPU, resident on a CPU; 0 if unknown."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return 0
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def one_line(facts: dict[str, str | int]) -> str:
    """Return `describe`'s facts as one line for people."""
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return (
        f"{gpu}{facts['cpu']}, {facts['cores']} cores (torch uses {facts['threads']}), {facts['system']}, "
        f"Python {facts['python']}, torch {facts['torch']}, narrowcast {facts['narrowcast']}"
    )
