"""What a step does that runs on several streams: kernels by group, and what the computing stream waits for."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 4
# Parts of kernels' names, first match wins; Inductor names a kernel after the operators that it fuses.
_GROUPS = (
    ("NCCL, gather", r"nccl.*AllGather"),
    ("NCCL, reduction", r"nccl.*(ReduceScatter|SendRecv)"),
    ("NCCL, other", r"nccl"),
    ("sums of gradients", r"rank_sum"),
    ("optimizer", r"adam|multi_tensor_apply"),
    ("attention", r"sdpa|flash|fmha|compute_dot_do_o|convert_dq|rope"),
    ("GEMM", r"nvjet|gemm|cutlass|splitK"),
    ("head and loss", r"softmax|nll_loss|cross_entropy"),
    ("casts", r"float8|delayed|_scaled_mm|quantize"),
    ("norms", r"norm"),
    ("activations", r"activation|silu"),
    ("copies of FSDP2", r"split_with_sizes_copy|chunk_cat"),
    ("copies", r"copy|memcpy|cat"),
)


class Ran(NamedTuple):
    """A kernel that ran: microseconds on its stream; ``grid``: of its programs, as the profiler writes it."""

    name: str
    stream: int
    start: float
    end: float
    grid: str = ""


def print_streams(title: str, step: Callable[[], object], most: int = 24, shown: bool = True) -> None:
    """Run steps under PyTorch's profiler and print where the time of one goes: by group, waits, the longest kernels.

    Several in a row, so that the host is ahead and the GPU as hot as in training.

    Args:
        shown: False on ranks that only run the steps alike.
    """
    with profile(
        activities=[ProfilerActivity.CUDA]
    ) as profiler:  # noting operators, too, would hold the host up
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    if not shown:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    print("\n".join([f"-- {title}", *lines_of(kernels_of(events), most, STEPS)]), flush=True)


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Ran]:
    """Read what ran on the GPU out of the events of a Chrome trace, in the order of its start."""
    return sorted(
        (
            Ran(
                event["name"],
                event["args"].get("stream", 0),
                event["ts"],
                event["ts"] + event["dur"],
                str(event["args"].get("grid", "")),
            )
            for event in events
            if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ),
        key=lambda ran: ran.start,
    )


def group_of(name: str) -> str:
    return next((group for group, words in _GROUPS if re.search(words, name, re.IGNORECASE)), "other")


def lines_of(ran: Sequence[Ran], most: int, steps: int = 1) -> list[str]:
    """Return the account of one of so many steps: the computing stream's groups, what others take, and what is left.

    ``alone``: while the computing stream runs nothing. ``beside``: what kernels of the computing stream take longer
    while others run than their like do alone.
    """
    times: dict[int, float] = defaultdict(float)
    for one in ran:
        times[one.stream] += one.end - one.start
    computing = max(times, key=lambda stream: times[stream])
    own = [one for one in ran if one.stream == computing]
    others = [one for one in ran if one.stream != computing]
    span = max(one.end for one in ran) - ran[0].start
    busy = _union(own)
    both = _union(ran)
    lines = [
        f"   span {span / steps / 1e3:.1f} ms: computing stream {busy / steps / 1e3:.1f}, "
        f"others alone {(both - busy) / steps / 1e3:.1f}, nothing {(span - both) / steps / 1e3:.1f}"
    ]
    sorted_own = _Sorted(own)
    alone = {id(one): _outside(one, sorted_own) for one in others}
    lines += _groups("computing", own, _beside(own, _Sorted(others)), "beside", steps)
    lines += _groups("others", others, alone, "alone", steps)
    lines += _waits(own, others, ran[0].start, most // 2)
    named: dict[str, list[float]] = defaultdict(list)
    for one in ran:
        named[re.sub(r"^void |<.*|\(.*", "", one.name)[:60]].append((one.end - one.start) / 1e3)
    ranked = sorted(named.items(), key=lambda item: -sum(item[1]))[:most]
    lines += [
        f"   {sum(each) / steps:8.2f} ms x{len(each) / steps:<4.0f} longest {max(each):.2f} {name}"
        for name, each in ranked
    ]
    return lines


def _waits(own: Sequence[Ran], others: Sequence[Ran], began: float, most: int) -> list[str]:
    """Return the longest waits of the computing stream: when, what ran meanwhile, and what came after."""
    waits, end = [], began
    for one in own:
        if one.start > end:
            waits.append((one.start - end, end, one))
        end = max(end, one.end)
    lines, near = [], _Sorted(others)
    for took, start, then in sorted(waits, key=lambda wait: -wait[0])[:most]:
        meanwhile: dict[str, float] = defaultdict(float)
        for other in near.near(start, start + took):
            shared = min(other.end, start + took) - max(other.start, start)
            if shared > 0:
                meanwhile[group_of(other.name)] += shared / 1e3
        ran = ", ".join(f"{group} {ms:.2f}" for group, ms in meanwhile.items()) or "nothing"
        at = f"{took / 1e3:.2f} ms at {(start - began) / 1e3:.1f}"
        lines.append(f"   waits {at} before {group_of(then.name)}: {ran}")
    return lines


def _groups(title: str, ran: Sequence[Ran], parts: dict[int, float], column: str, steps: int) -> list[str]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one in ran:
        entry = sums[group_of(one.name)]
        entry[0] += (one.end - one.start) / 1e3 / steps
        entry[1] += 1 / steps
        entry[2] += parts.get(id(one), 0.0) / 1e3 / steps
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    return [
        f"   {title}: {group:18s} {ms:8.2f} ms x{count:<5.0f} {column} {part:.2f}"
        for group, (ms, count, part) in ranked
    ]


def _union(ran: Sequence[Ran]) -> float:
    total, end = 0.0, float("-inf")
    for one in ran:
        total += max(0.0, one.end - max(one.start, end))
        end = max(end, one.end)
    return total


class _Sorted:
    """Kernels in the order of their start, of which those at a time are found quickly."""

    def __init__(self, ran: Sequence[Ran]) -> None:
        self.ran, self.starts = ran, [one.start for one in ran]
        self.longest = max((one.end - one.start for one in ran), default=0.0)

    def near(self, start: float, end: float) -> Sequence[Ran]:
        """Return all that run between two times, and perhaps others."""
        return self.ran[bisect_left(self.starts, start - self.longest) : bisect_left(self.starts, end)]


def _outside(one: Ran, own: _Sorted) -> float:
    """Return how long a kernel runs while none of ``own`` does."""
    inside = [
        Ran("", 0, max(one.start, other.start), min(one.end, other.end))
        for other in own.near(one.start, one.end)
        if other.start < one.end and other.end > one.start
    ]
    return one.end - one.start - _union(inside)


def _beside(own: Sequence[Ran], others: _Sorted) -> dict[int, float]:
    """Return, by identity, what kernels take longer beside others than their like do alone."""
    alone: dict[tuple[str, str], list[float]] = defaultdict(list)
    shared: list[Ran] = []
    for one in own:
        if any(other.end > one.start for other in others.near(one.start, one.end)):
            shared.append(one)
        else:
            alone[one.name, one.grid].append(one.end - one.start)
    medians = {kind: statistics.median(each) for kind, each in alone.items()}
    return {
        id(one): one.end - one.start - medians[one.name, one.grid]
        for one in shared
        if (one.name, one.grid) in medians
    }
