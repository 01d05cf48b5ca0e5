"""What a step's time consists of: its kernels under PyTorch's profiler, by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

from narrowcast_tools.bench.account import Kernel, profiled

_NOISE = re.compile(r"^void |<.*|\(.*")


def print_account(title: str, step: Callable[[], object], step_ms: float, most: int = 16) -> None:
    """Print the kernels of one step that the host issues, by name and operator, the longest first.

    Args:
        step_ms: the step's time, as measured; what its kernels leave of it is printed as gaps.
        most: kernels to print; the others are summed up.
    """
    step()
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in profiled(step):
        times[_name(kernel), kernel.operator].append(kernel.ms)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    total = sum(map(sum, times.values()))
    print(f"-- {title}: {step_ms:.3f} ms; kernels {total:.3f}, gaps {step_ms - total:.3f}", flush=True)
    for (name, operator), each in ranked[:most]:
        longest = f"longest {max(each):.3f}" if len(each) > 1 else ""
        print(f"   {sum(each):7.3f} ms x{len(each):<3d} {name:36s} {operator} {longest}", flush=True)
    rest = [time for _, each in ranked[most:] for time in each]
    print(f"   {sum(rest):7.3f} ms x{len(rest):<3d} others", flush=True)


def _name(kernel: Kernel) -> str:
    return _NOISE.sub("", kernel.name).rsplit("::", 1)[-1][:36]
