"""Quantize kernels against a device copy: time, share of copy bandwidth, and torch.compile of the same expression.

Every kernel is first compared with the reference, byte for byte, on a ragged and on an even shape. Then all contenders
of a shape are timed in turns, round after round, each turn a few launches between two CUDA events. The input is taken
from a ring of buffers larger than the cache, so that no launch finds it there; a copy is timed under the same rules.

`bytes` counts what the pass must move per element: each input read and each output written once (current scaling and
NVFP4 read the input twice: the amax needs all of it first). `share` is that traffic per second over the copy's.
With --sweep, other tile shapes are timed for the kernels that have a choice.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, parser, report
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3

if kernels.AVAILABLE:
    from narrowcast.kernels import float8, float8_block, mxfp8, nvfp4, tiles
    from narrowcast.kernels.launch import Launcher

SHAPES = ((8192, 4096), (16384, 4096), (16384, 14336), (14336, 4096))
CHECKED_SHAPES = ((1000, 1144), (1024, 1536))
RING_BYTES = 512 * 2**20  # several times the last-level cache
LAUNCHES = 4  # per turn

Case = Callable[[Tensor], Any]


def options(**chosen: Any) -> dict[str, Any]:
    return {"rowwise": True, "columnwise": True, **chosen}


def cases(module: Any, scale: Tensor, amax: Tensor, seed: Tensor) -> dict[str, tuple[Case, float]]:
    """Name -> function of the input, bytes per element in bf16."""
    block = options(fmt=E4M3, power_2=True, epsilon=0.0)
    current = options(fmt=E4M3, power_2=False, epsilon=0.0)
    running = {"amax": amax} if module is kernels else {}
    nvfp4 = 2 + 2 + 2 * (1 / 2 + 1 / 16)
    return {
        "fp8 given scale + amax": (
            lambda x: module.float8.quantize(x, scale, E4M3, **options(), **running),
            4.0,
        ),
        "fp8 current": (lambda x: module.float8.quantize_current(x, **current), 6.0),
        "fp8 128-block 1-D": (lambda x: module.float8_block.quantize(x, block_dim=1, **block), 4 + 8 / 128),
        "fp8 128-block 2-D": (
            lambda x: module.float8_block.quantize(x, block_dim=2, **block),
            4 + 8 / 128**2,
        ),
        "mxfp8 1-D": (lambda x: module.mxfp8.quantize(x, E4M3, **options()), 4 + 2 / 32),
        "mxfp8 2-D": (lambda x: module.mxfp8.quantize(x, E4M3, **options(two_d=True)), 4 + 2 / 32),
        "nvfp4 1-D": (lambda x: module.nvfp4.quantize(x, **options()), nvfp4),
        "nvfp4 2-D": (lambda x: module.nvfp4.quantize(x, **options(two_d=True)), nvfp4),
        "nvfp4 RHT": (lambda x: module.nvfp4.quantize(x, **options(rht=True)), nvfp4),
        "nvfp4 RHT + SR": (lambda x: module.nvfp4.quantize(x, **options(rht=True, seed=seed)), nvfp4),
    }


def gate(scale: Tensor, amax: Tensor, seed: Tensor) -> None:
    """Exit with the difference if a kernel and the reference disagree in one byte."""
    for shape in CHECKED_SHAPES:
        x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        expected = cases(reference, scale.cpu(), amax, seed.cpu())
        for name, (run, _) in cases(kernels, scale, amax, seed).items():
            for index, (a, b) in enumerate(zip(run(x), expected[name][0](x.cpu()), strict=True)):
                differing = int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
                if differing:
                    sys.exit(
                        f"{name} on {shape}: buffer {index} differs from the reference in {differing} bytes"
                    )
    print(
        f"correct: {len(cases(kernels, scale, amax, seed))} kernels equal the reference on {CHECKED_SHAPES}"
    )


def compiled_peers(scale: Tensor, amax: Tensor) -> dict[str, tuple[Case, float]]:
    """The per-tensor expressions as a user would write them, compiled."""

    def given(x: Tensor) -> tuple[Tensor, ...]:
        data = (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return data, data.t().contiguous(), scale.reciprocal(), torch.maximum(amax, x.abs().amax().float())

    def current(x: Tensor) -> tuple[Tensor, ...]:
        own = 448.0 / x.abs().amax().float()
        data = (x.float() * own).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return data, data.t().contiguous(), own.reciprocal()

    return {
        "torch.compile: fp8 given scale + amax": (torch.compile(given, fullgraph=True, dynamic=False), 4.0),
        "torch.compile: fp8 current": (torch.compile(current, fullgraph=True, dynamic=False), 6.0),
    }


def ring(shape: tuple[int, int]) -> list[Tensor]:
    count = max(2, -(-RING_BYTES // (2 * shape[0] * shape[1])))
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]


def time_in_turns(contenders: dict[str, Case], inputs: list[Tensor], repeats: int) -> dict[str, list[float]]:
    """Microseconds per launch of every contender, one value per round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    position = 0
    for turn in range(repeats + 2):
        for name, run in contenders.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_500_000)  # the launches queue up behind it: host time stays out of the events
            start.record()
            for _ in range(LAUNCHES):
                run(inputs[position % len(inputs)])
                position += 1
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return times


def measure(chosen: Namespace, extra: dict[str, tuple[Case, float]]) -> list[Row]:
    scale = torch.full((1,), 90.0, device="cuda")
    amax = torch.zeros(1, device="cuda")
    seed = torch.tensor([1234], device="cuda")
    if not chosen.skip_gate:
        gate(scale, amax, seed)
    rows: list[Row] = []
    for shape in SHAPES[: chosen.shapes]:
        inputs = ring(shape)
        target = torch.empty_like(inputs[0])
        table: dict[str, tuple[Case, float]] = {
            "copy": (target.copy_, 4.0),
            **cases(kernels, scale, amax, seed),
            **extra,
        }
        if not chosen.skip_compile:
            torch._dynamo.reset()
            table |= compiled_peers(scale, amax)
        times = time_in_turns({name: run for name, (run, _) in table.items()}, inputs, chosen.repeats)
        rows += summarize(shape, table, times)
        del inputs, target
        torch.cuda.empty_cache()
    return rows


def summarize(
    shape: tuple[int, int], table: dict[str, tuple[Case, float]], times: dict[str, list[float]]
) -> list[Row]:
    elements = shape[0] * shape[1]
    copy_rate = 4.0 * elements / statistics.median(times["copy"])
    rows: list[Row] = []
    for name, (_, per_element) in table.items():
        fifths = statistics.quantiles(times[name], n=5, method="inclusive")
        median = statistics.median(times[name])
        rate = per_element * elements / median
        peer = times.get(f"torch.compile: {name}")
        rows.append(
            {
                "shape": f"{shape[0]}x{shape[1]}",
                "kernel": name,
                "bytes": round(per_element, 4),
                "us_p50": round(median, 2),
                "us_p20": round(fifths[0], 2),
                "us_p80": round(fifths[3], 2),
                "TB/s": round(rate / 1e6, 3),
                "share": round(rate / copy_rate, 3),
                "vs_compiled": round(statistics.median(peer) / median, 2) if peer else "",
            }
        )
    return rows


def sweep_cases(scale: Tensor, amax: Tensor) -> dict[str, tuple[Case, float]]:
    """Variants of the kernels whose tiles or registers can be chosen; each run sets the launcher it names."""
    table: dict[str, tuple[Case, float]] = {}

    def add(name: str, per_element: float, settings: list[tuple[Any, str, Any]], run: Case) -> None:
        def with_settings(x: Tensor) -> None:
            saved = [(module, key, getattr(module, key)) for module, key, _ in settings]
            for module, key, value in settings:
                setattr(module, key, value)
            try:
                run(x)
            finally:
                for module, key, value in saved:
                    setattr(module, key, value)

        table[name] = (with_settings, per_element)

    base = cases(kernels, scale, amax, torch.tensor([1], device="cuda"))
    for rows, columns, warps, registers in (
        (128, 64, 4, None), (128, 64, 4, 64), (128, 128, 8, None), (128, 128, 8, 64), (128, 128, 4, None),
        (64, 128, 4, None), (256, 64, 8, None), (256, 32, 4, None), (128, 32, 2, None), (64, 64, 2, None),
    ):  # fmt: skip
        extra = {} if registers is None else {"maxnreg": registers}
        launcher = Launcher(float8._cast_transpose.kernel, num_warps=warps, **extra)
        settings = [
            (float8, "TILE_ROWS", rows),
            (float8, "TILE_COLUMNS", columns),
            (float8, "_cast_transpose", launcher),
        ]
        add(f"cast {rows}x{columns} w{warps} r{registers}", 4.0, settings, base["fp8 given scale + amax"][0])
    for bits in (0, 1, 2, 4, 5):
        add(f"cast band {2**bits}", 4.0, [(tiles, "BAND_BITS", bits)], base["fp8 given scale + amax"][0])
        add(f"block 1-D band {2**bits}", 4.0625, [(tiles, "BAND_BITS", bits)], base["fp8 128-block 1-D"][0])
    for warps, registers in ((4, None), (8, None), (8, 80), (16, None)):
        extra = {} if registers is None else {"maxnreg": registers}
        launcher = Launcher(float8_block._vector.kernel, num_warps=warps, **extra)
        settings = [(float8_block, "_vector", launcher)]
        add(f"block 1-D w{warps} r{registers}", 4.0625, settings, base["fp8 128-block 1-D"][0])
    for warps, registers in ((1, None), (1, 128), (1, 96), (2, None), (4, None)):
        extra = {} if registers is None else {"maxnreg": registers}
        launcher = Launcher(mxfp8._quantize.kernel, num_warps=warps, **extra)
        add(f"mxfp8 w{warps} r{registers}", 4.0625, [(mxfp8, "_quantize", launcher)], base["mxfp8 1-D"][0])
    for programs, block, warps in (
        (528, 8192, 4),
        (1024, 8192, 4),
        (1024, 16384, 8),
        (1024, 4096, 4),
        (264, 16384, 16),
    ):
        settings = [
            (float8, "AMAX_PROGRAMS", programs),
            (float8, "AMAX_BLOCK", block),
            (float8, "_amax", Launcher(float8._amax.kernel, num_warps=warps)),
        ]
        add(f"current amax {programs}x{block} w{warps}", 6.0, settings, base["fp8 current"][0])
    for columns, warps, registers in (
        (64, 4, None),
        (64, 4, 80),
        (64, 2, None),
        (128, 4, None),
        (128, 8, None),
    ):
        extra = {} if registers is None else {"maxnreg": registers}
        settings = [
            (nvfp4, "TILE_K", columns),
            (nvfp4, "_encode_tiles", Launcher(nvfp4._encode_tiles.kernel, num_warps=warps, **extra)),
            (nvfp4, "_amax", Launcher(nvfp4._amax.kernel, num_warps=warps, **extra)),
        ]
        add(f"nvfp4 RHT 128x{columns} w{warps} r{registers}", 5.125, settings, base["nvfp4 RHT"][0])
    return table


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="how many of the shapes, from the first on"
    )
    flags.add_argument("--sweep", action="store_true", help="time other tile shapes too")
    flags.add_argument("--skip-compile", action="store_true", help="without the compiled peers")
    flags.add_argument("--skip-gate", action="store_true", help="without the comparison with the reference")
    chosen = flags.parse_args()
    if chosen.device != "cuda" or not kernels.AVAILABLE:
        print("bench_quantize needs a CUDA device and Triton; nothing to measure here")
        return
    torch.manual_seed(0)
    extra = {}
    if chosen.sweep:
        extra = sweep_cases(torch.full((1,), 90.0, device="cuda"), torch.zeros(1, device="cuda"))
    report("quantize", measure(chosen, extra), chosen)


if __name__ == "__main__":
    main()
