"""Quantize kernels against a device copy: time, share of copy bandwidth, and speed against what users have.

Every kernel is first compared with the reference, byte for byte, on a ragged and on an even shape. Then all contenders
of a shape are timed in turns, round after round, each turn a few launches between two CUDA events. The input is taken
from a ring of buffers larger than the cache, so that no launch finds it there; a copy is timed under the same rules.

`bytes` counts what the pass must move per element: each input read and each output written once (current scaling and
NVFP4 read the input twice: the amax needs all of it first). `share` is that traffic per second over the copy's.
Peers are plain PyTorch under torch.compile and, where it is installed, torchao's kernels.
With --sweep, other tile shapes and launch options are timed for the kernels that have a choice.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from harness import SWEEP, TENSORS, Row, compare, compiled, parser, report_on_gpu
from peers import expressions, torchao
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3
from narrowcast.reference.hadamard import rht_matrix

if kernels.AVAILABLE:
    from narrowcast.kernels.launch import Launcher

SEED = 1234
BYTES = {
    "fp8 given scale + amax": 4.0,
    "fp8 current": 6.0,
    "fp8 128-block 1-D": 4 + 8 / 128,
    "fp8 128-block 2-D": 4 + 8 / 128**2,
    "mxfp8 1-D": 4 + 2 / 32,
    "mxfp8 2-D": 4 + 2 / 32,
    "nvfp4 1-D": 4 + 2 * (1 / 2 + 1 / 16),
    "nvfp4 2-D": 4 + 2 * (1 / 2 + 1 / 16),
    "nvfp4 RHT": 4 + 2 * (1 / 2 + 1 / 16),
    "nvfp4 RHT + SR": 4 + 2 * (1 / 2 + 1 / 16),
}
Table = dict[str, tuple[Callable[[Tensor], Any], float]]


def kernel_table(module: ModuleType, device: str) -> Table:
    """The quantize functions of ``kernels`` or ``reference``, both directions."""
    scale, amax = torch.full((1,), 90.0, device=device), torch.zeros(1, device=device)
    seed = torch.tensor([SEED], device=device)
    both = {"rowwise": True, "columnwise": True}
    block = {**both, "power_2": True, "epsilon": 0.0}
    float8, float8_block, mx, nvfp4 = module.float8, module.float8_block, module.mx, module.nvfp4
    runs: dict[str, Callable[[Tensor], Any]] = {
        "fp8 given scale + amax": lambda x: float8.quantize(x, scale, E4M3, amax=amax, **both),
        "fp8 current": lambda x: float8.quantize_current(x, E4M3, power_2=False, epsilon=0.0, **both),
        "fp8 128-block 1-D": lambda x: float8_block.quantize(x, E4M3, block_dim=1, **block),
        "fp8 128-block 2-D": lambda x: float8_block.quantize(x, E4M3, block_dim=2, **block),
        "mxfp8 1-D": lambda x: mx.quantize(x, E4M3, **both),
        "mxfp8 2-D": lambda x: mx.quantize(x, E4M3, two_d=True, **both),
        "nvfp4 1-D": lambda x: nvfp4.quantize(x, **both),
        "nvfp4 2-D": lambda x: nvfp4.quantize(x, two_d=True, **both),
        "nvfp4 RHT": lambda x: nvfp4.quantize(x, rht=True, **both),
        "nvfp4 RHT + SR": lambda x: nvfp4.quantize(x, rht=True, seed=seed, **both),
    }
    return {name: (run, BYTES[name]) for name, run in runs.items()}


def expression_table(device: str) -> Table:
    """The same in plain PyTorch, except for stochastic rounding, whose random bits would differ."""
    scale, amax = torch.full((1,), 90.0, device=device), torch.zeros(1, device=device)
    rotation = rht_matrix(True, device, torch.bfloat16)
    runs: dict[str, Callable[[Tensor], Any]] = {
        "fp8 given scale + amax": lambda x: expressions.given_scale(x, scale, amax),
        "fp8 current": expressions.current_scale,
        "fp8 128-block 1-D": expressions.block_1d,
        "fp8 128-block 2-D": expressions.block_2d,
        "mxfp8 1-D": expressions.mxfp8_1d,
        "mxfp8 2-D": expressions.mxfp8_2d,
        "nvfp4 1-D": expressions.nvfp4_1d,
        "nvfp4 2-D": expressions.nvfp4_2d,
        "nvfp4 RHT": lambda x: expressions.nvfp4_rht(x, rotation),
    }
    return {name: (run, BYTES[name]) for name, run in runs.items()}


def torchao_table() -> Table:
    """What torchao has a kernel for, counted with the bytes that one pass would move."""
    runs = {
        "fp8 current": torchao.current_scale,
        "fp8 128-block 1-D": torchao.block_1d,
        "fp8 128-block 2-D": torchao.block_2d,
    }
    return {f"torchao: {name}": (run, BYTES[name]) for name, run in runs.items()}


def random_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor]:
    return (torch.randn(shape, dtype=torch.bfloat16, device=device),)


class Variant(NamedTuple):
    """A kernel with other tiles, launched with other options."""

    kernel: str
    module: str
    launcher: str
    warps: int
    registers: int | None = None
    tiles: dict[str, int] = {}  # noqa: RUF012  (a tuple's default, never changed)


VARIANTS = (
    *(
        Variant(
            "fp8 given scale + amax", "float8", "_cast_tile", warps, registers,
            {"TILE_ROWS": rows, "TILE_COLUMNS": columns},
        )
        for rows, columns, warps, registers in (
            (128, 64, 4, None), (128, 64, 4, 64), (128, 128, 8, None), (128, 128, 8, 64), (256, 64, 8, None),
            (256, 32, 4, None), (128, 32, 2, None), (64, 64, 2, None),
        )
    ),
    *(
        Variant("fp8 current", "float8", "_amax", warps, None, {"AMAX_PROGRAMS": programs, "AMAX_BLOCK": block})
        for programs, block, warps in ((528, 8192, 4), (1024, 16384, 8), (1024, 4096, 4), (264, 16384, 16))
    ),
    *(
        Variant("fp8 128-block 1-D", "float8_block", "_four_warps", warps, registers)
        for warps, registers in ((4, 128), (8, None), (8, 80))
    ),
    *(
        Variant("mxfp8 1-D", "mx", "_two_warps", warps, registers)
        for warps, registers in ((1, None), (1, 96), (2, None), (4, None))
    ),
    *(
        Variant("nvfp4 RHT", "nvfp4", "_encode_tiles", warps, registers, {"TILE_K": columns})
        for columns, warps, registers in ((64, 4, 80), (64, 2, None), (128, 4, None), (128, 8, None))
    ),
)  # fmt: skip


def sweep_table(table: Table) -> Table:
    """The variants whose module still has what they set; the others are named and left out."""
    found: Table = {}
    for variant in VARIANTS:
        module = getattr(kernels, variant.module)
        missing = [name for name in (variant.launcher, *variant.tiles) if not hasattr(module, name)]
        chosen = f"w{variant.warps} r{variant.registers} {variant.tiles or ''}"
        title = f"{SWEEP}{variant.kernel} {variant.launcher} {chosen}"
        if missing:
            print(f"skipped {title}: kernels.{variant.module} has no {', '.join(missing)}")
            continue
        found[title] = (_with(module, variant, table[variant.kernel][0]), BYTES[variant.kernel])
    return found


def _with(module: ModuleType, variant: Variant, run: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    registers = {} if variant.registers is None else {"maxnreg": variant.registers}
    launcher = Launcher(getattr(module, variant.launcher).kernel, num_warps=variant.warps, **registers)

    def run_variant(x: Tensor) -> Any:
        with _set(module, {variant.launcher: launcher, **variant.tiles}):
            return run(x)

    return run_variant


@contextmanager
def _set(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    saved = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def measure(chosen: Namespace) -> list[Row]:
    table = kernel_table(kernels, "cuda")
    peers = sweep_table(table) if chosen.sweep else {}
    if torchao.AVAILABLE:
        peers |= torchao_table()
    if not chosen.skip_compile:
        peers |= compiled(expression_table("cuda"))
    return compare(chosen, TENSORS, random_input, table, kernel_table(reference, "cpu"), peers)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--sweep", action="store_true", help="time other tile shapes too")
    report_on_gpu("quantize", measure, flags.parse_args())


if __name__ == "__main__":
    main()
