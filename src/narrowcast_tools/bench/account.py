"""Time of a training step by groups of kernels, each with its bytes and the floor of the chip."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .asked import Work
from .measure import MODES, Contender
from .works import VOCABULARY, Step, build, phases_of

GROUPS = (
    "GEMM, fprop",
    "GEMM, dgrad",
    "GEMM, wgrad",
    "casts",
    "norms",
    "activations",
    "attention",
    "head and loss",
    "optimizer",
    "other",
    "gaps",
)
PHASES = ("forward", "backward", "optimizer")
"""Ranges of a step that its profile names; a kernel belongs to the one that launched it."""

_GEMMS = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm")
_ATTENTION = ("attention", "flash", "fmha", "sdpa")
# Parts of kernels' names, first match wins. Inductor names a kernel after the operators that it fuses.
_BY_NAME = (
    ("head and loss", ("softmax", "nll_loss", "cross_entropy")),
    ("casts", ("float8", "mx_quantize", "nvfp4", "delayed", "reduction", "swizzle", "grouped_quantize")),
    ("activations", ("activation", "silu", "gelu", "sigmoid")),
    ("norms", ("norm", "rsqrt")),
    ("attention", ("rope",)),
)
_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e8m0fnu": 1,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


class Kernel(NamedTuple):
    """One kernel of a profiled step.

    Attributes:
        name: as the GPU knows it.
        operator: the innermost operator that launched it; "" if none was recorded.
        phase: of ``PHASES``; "" outside them.
        ms: its time on the GPU.
        shapes: of the operator's tensors, each with bytes per element.
    """

    name: str
    operator: str
    phase: str
    ms: float
    shapes: tuple[tuple[tuple[int, ...], int], ...]


class Ceilings(NamedTuple):
    """The chip's rates: bytes per second of a device copy, operations per second of the library's GEMMs."""

    copy: float
    bf16: float
    fp8: float


class Row(NamedTuple):
    """A group of a step.

    Attributes:
        ms: GPU time of its kernels; of "gaps", the time in which no kernel runs.
        bytes: what its kernels' tensors take, each counted once per kernel.
        floor_ms: the time that operations or bytes take at the ceilings; 0 if neither is known.
    """

    group: str
    ms: float
    kernels: int
    bytes: int
    floor_ms: float


class Account(NamedTuple):
    """The account of one contender's step. ``captured``: timed as the replay of a CUDA graph."""

    contender: str
    step_ms: float
    captured: bool
    rows: tuple[Row, ...]


def take_account(work: Work, contender: Contender, ceilings: Ceilings, *, in_parts: bool = False) -> Account:
    """Return profile one compiled training step of a model and group its kernels; needs a GPU.

    Time per kernel comes from a step that the host issues; ``step_ms`` from replays of the same step as a CUDA graph,
    where capturing succeeds, so that "gaps" is what the GPU waits for between kernels. ``in_parts``: four blocks are
    compiled, not the whole model, which takes less time.
    """
    torch.compiler.reset()
    module = contender.prepare(build(work, contender.layers, "cuda", contender.head))
    if in_parts:
        module.compile_parts()  # type: ignore[operator]
    run = module if in_parts else MODES["compiled"](module)

    def forward(*given: Any) -> Any:
        with contender.around():
            return run(*given)

    phases = phases_of(work, module, forward, "cuda", capturable=True, optimizer=contender.optimizer)
    for _ in range(4):
        _run_phases(phases)
    kernels = profiled(lambda: _run_phases(phases))
    step_ms, captured = _step_ms(phases)
    rows = group_kernels(kernels, work, ceilings, step_ms)
    return Account(contender.name, step_ms, captured, tuple(rows))


def measure_ceilings() -> Ceilings:
    """Time a copy of 2 GiB and products of 8192 x 8192 matrices in bf16 and FP8 on random data."""
    source = torch.randn(2**29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / (1e-3 * _median_ms(lambda: target.copy_(source)))
    a, b = (torch.randn(8192, 8192, dtype=torch.float32, device="cuda").to(torch.bfloat16) for _ in range(2))
    operations = 2 * 8192**3
    bf16 = operations / (1e-3 * _median_ms(lambda: a @ b.t()))
    codes_a, codes_b, one = (
        a.to(torch.float8_e4m3fn),
        b.to(torch.float8_e4m3fn),
        torch.ones((), dtype=torch.float32, device="cuda"),
    )
    scaling = torch.nn.functional.ScalingType.TensorWise

    def product() -> torch.Tensor:
        return torch.nn.functional.scaled_mm(
            codes_a, codes_b.t(), one, scaling, one, scaling, output_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Ceilings(copy, bf16, operations / (1e-3 * _median_ms(product)))


def _run_phases(phases: Sequence[tuple[str, Step]]) -> None:
    for name, phase in phases:
        with record_function(name):
            phase()


def _step_ms(phases: Sequence[tuple[str, Step]]) -> tuple[float, bool]:
    """Return milliseconds per step and whether it was captured."""

    def step() -> None:
        for _, phase in phases:
            phase()

    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:  # what captures depends on the release of PyTorch and the contender
        torch.cuda.synchronize()
        return _median_ms(step), False
    return _median_ms(graph.replay), True


def _median_ms(step: Callable[[], object], rounds: int = 5, launches: int = 8) -> float:
    times = []
    step()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / launches)
    return statistics.median(times)


def profiled(step: Step) -> list[Kernel]:
    """Run a step under PyTorch's profiler and return its kernels."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(read_kernels(json.loads(path.read_text())["traceEvents"]))


def read_kernels(events: Iterable[dict[str, Any]]) -> Iterator[Kernel]:
    """Read the kernels out of the events of a Chrome trace.

    An operator that launches several kernels gives its shapes to the longest, so that its work counts once.
    """
    events = [event for event in events if event.get("ph") == "X"]
    operators = {event["args"].get("External id"): event for event in _of(events, "cpu_op")}
    launches = {
        event["args"].get("correlation"): event["ts"] for event in _of(events, "cuda_runtime", "cuda_driver")
    }
    ranges = [event for event in _of(events, "user_annotation") if event["name"] in PHASES]
    started = set()
    for event in sorted(_of(events, "kernel", "gpu_memcpy", "gpu_memset"), key=lambda event: -event["dur"]):
        args = event["args"]
        call, launch = args.get("External id"), launches.get(args.get("correlation"), -1.0)
        operator = operators.get(call, {"name": "", "args": {}})
        phase = next((one["name"] for one in ranges if one["ts"] <= launch <= one["ts"] + one["dur"]), "")
        shapes = () if call in started else _shapes(operator["args"])
        started.add(call)
        yield Kernel(event["name"], operator["name"], phase, event["dur"] / 1e3, shapes)


def _of(events: Iterable[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [{"args": {}, **event} for event in events if event.get("cat") in categories]


def _shapes(args: dict[str, Any]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return shapes and bytes per element of an operator's tensors; lists of tensors are left out."""
    pairs = zip(args.get("Input Dims", []), args.get("Input type", []))
    return tuple(
        (tuple(dims), _BYTES[kind])
        for dims, kind in pairs
        if kind in _BYTES and all(isinstance(size, int) for size in dims)
    )


def group_of(kernel: Kernel, tokens: int) -> str:
    """Return the group of a kernel.

    Args:
        tokens: rows of the step's activations; a GEMM of the backward that sums over them is a wgrad.
    """
    operator, name = _base_name(kernel), kernel.name.lower()
    if kernel.phase == "optimizer":
        return "optimizer"
    if any(word in name or word in operator for word in _ATTENTION):
        return "attention"
    if operator in _GEMMS:
        if len(kernel.shapes) < 2:  # sums the parts of a split product, or clears memory for it
            return "other"
        sizes = _gemm_sizes(kernel)
        if VOCABULARY in sizes:
            return "head and loss"
        if kernel.phase == "forward":
            return "GEMM, fprop"
        return "GEMM, wgrad" if sizes[2] == tokens else "GEMM, dgrad"
    group = next((group for group, words in _BY_NAME if any(word in name for word in words)), "other")
    if group == "casts" and any(VOCABULARY in dims for dims, _ in kernel.shapes):
        return "head and loss"
    return group


def _base_name(kernel: Kernel) -> str:
    """Return the operator's name without namespace and overload."""
    return kernel.operator.rpartition("::")[2].partition(".")[0]


def _gemm_sizes(kernel: Kernel) -> tuple[int, int, int]:
    """Return M, N and K of a product (M, K) x (K, N)."""
    matrices = [dims for dims, _ in kernel.shapes if len(dims) >= 2][:2]
    return matrices[0][-2], matrices[1][-1], matrices[0][-1]


def group_kernels(kernels: Sequence[Kernel], work: Work, ceilings: Ceilings, step_ms: float) -> Iterator[Row]:
    """Yield a row per group that has kernels, in the order of ``GROUPS``; "gaps" is what is left of the step."""
    count, width, hidden, heads, key_heads, batch, length = work.sizes
    groups: dict[str, list[Kernel]] = {name: [] for name in GROUPS}
    for kernel in kernels:
        groups[group_of(kernel, batch * length)].append(kernel)
    # Forward two products, backward five, half of each under a causal mask.
    attention = 7 * count * batch * length**2 * width
    head = 3 * 2 * batch * length * width * VOCABULARY
    parameters = count * (width * (2 * width + 2 * width * key_heads // heads) + 3 * width * hidden)
    parameters += 2 * width * VOCABULARY
    floors = {
        "attention": attention / ceilings.bf16,
        "head and loss": head / _rate_of_head(groups["head and loss"], ceilings),
        "optimizer": 14 * parameters / ceilings.copy,  # reads four tensors of bf16 and writes three
    }
    for name, found in groups.items():
        if not found:
            continue
        moved = sum(_bytes_of(kernel) for kernel in found)
        if name.startswith("GEMM"):
            floor = sum(_gemm_seconds(kernel, ceilings) for kernel in found if kernel.shapes)
        else:
            floor = floors.get(name, moved / ceilings.copy)
        yield Row(name, sum(kernel.ms for kernel in found), len(found), moved, 1e3 * floor)
    yield Row("gaps", max(step_ms - sum(kernel.ms for kernel in kernels), 0.0), 0, 0, 0.0)


def _rate_of_head(kernels: Sequence[Kernel], ceilings: Ceilings) -> float:
    """Return operations per second of the products that these kernels compute."""
    quantized = any(_base_name(one) in _GEMMS and one.shapes[0][1] == 1 for one in kernels if one.shapes)
    return ceilings.fp8 if quantized else ceilings.bf16


def _bytes_of(kernel: Kernel) -> int:
    moved = sum(size * math.prod(dims) for dims, size in kernel.shapes)
    if _base_name(kernel) in _GEMMS and len(kernel.shapes) > 1:
        rows, columns, _ = _gemm_sizes(kernel)
        moved += 2 * rows * columns
    return moved


def _gemm_seconds(kernel: Kernel, ceilings: Ceilings) -> float:
    rate = ceilings.fp8 if kernel.shapes[0][1] == 1 else ceilings.bf16
    return 2 * math.prod(_gemm_sizes(kernel)) / rate
