"""Compile the kernels, as their tests launch them, for GPUs that are not here; ``make kernels`` runs this.

    python tests/kernels/cross_compile.py [--gpus 89 90 100 120] [--kernels mx. norm.] [--fusion] [--table FILE]
    python tests/kernels/cross_compile.py --gpus 90 100 [--kernels mx. norm.] --record

No GPU is needed. Which launches: ``launches.json``, which ``record_launches.py`` writes. What is checked: that Triton
compiles each, that shared memory and registers fit the GPU, that no kernel holds what ptxas 12.9 miscompiles
(triton-lang/triton#11111), and that the code is what ``ptx.csv`` has hashes of. A change that claims to alter no bit
and no speed leaves that file as it is; ``--record`` is for the others, and for a new Triton.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import hashlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAUNCHES = Path(__file__).with_name("launches.json")
PTX = Path(__file__).with_name("ptx.csv")
RECORDED = (90, 100)
"""The GPUs whose code ``PTX`` has hashes of."""
SHARED_MEMORY = {89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes that a block may have, by compute capability: CUDA's programming guide, table of technical specifications."""
REGISTERS = 65536
"""That a block may have, on each of them."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel with the kinds of its arguments and its constants.

    Args:
        kernel: "module.function". kinds: as ``record_launches.kind_of`` names them, by argument.
    """

    kernel: str
    warps: int
    options: dict[str, Any]
    kinds: list[str]
    constants: list[Any]

    @property
    def key(self) -> str:
        """Name it among the variants of its kernel."""
        record = json.dumps([self.warps, self.options, self.kinds, self.constants])
        return hashlib.sha256(record.encode()).hexdigest()[:8]

    def source(self) -> Any:
        """Return what Triton compiles."""
        from triton.compiler import ASTSource

        module, name = self.kernel.split(".")
        kernel = getattr(importlib.import_module(f"narrowcast.kernels.{module}"), name)
        signature, constants, attributes = {}, {}, {}
        given = [*self.kinds, *(None for _ in self.constants)]
        for at, (parameter, kind) in enumerate(zip(kernel.params, given, strict=True)):
            if kind is None:
                signature[parameter.name] = "constexpr"
                constants[(at,)] = self.constants[at - len(self.kinds)]
            elif kind == "=None" or (kind == "=1" and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(at,)] = None if kind == "=None" else 1
            else:
                dtype, _, whole = kind.partition(":")
                signature[parameter.name] = "i32" if dtype == "=1" else dtype
                exempt = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
                if whole and not exempt:
                    attributes[(at,)] = [["tt.divisibility", 16]]
        return ASTSource(kernel, signature, constants, attributes)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a variant takes of a GPU.

    Args:
        shared: bytes per block. registers: per thread. spilled: bytes of a thread's stack.
        bytes_at_risk: it holds all of ``AT_RISK``.
    """

    warps: int
    shared: int
    registers: int
    spilled: int
    bytes_at_risk: bool

    def fault(self, gpu: int) -> str:
        """Why the GPU cannot run it, or ""."""
        if self.shared > SHARED_MEMORY[gpu]:
            return f"shared memory {self.shared} of {SHARED_MEMORY[gpu]}"
        if self.registers * 32 * self.warps > REGISTERS:
            return f"registers {self.registers} x {32 * self.warps} of {REGISTERS}"
        if self.bytes_at_risk:
            return "FP8 codes, maxima that keep NaN, and bytes to shared memory: triton-lang/triton#11111"
        return ""


def variants(only: list[str] | None = None) -> Iterator[Variant]:
    """Yield the recorded launches, of kernels whose names begin as one of ``only``."""
    for kernel, records in json.loads(LAUNCHES.read_text()).items():
        if not only or kernel.startswith(tuple(only)):
            for record in records:
                yield Variant(kernel, *record)


def compile_for(variant: Variant, gpu: int, **options: Any) -> Any:
    """Compile a variant; as Triton's errors leave it."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": variant.warps, "enable_fp_fusion": False, **variant.options, **options}
    if "num_stages" in variant.options:
        from narrowcast.kernels.grouped_gemm import FEW_STAGES, ROOM

        options["num_stages"] = FEW_STAGES if SHARED_MEMORY[gpu] < ROOM else variant.options["num_stages"]
    return triton.compile(variant.source(), target=GPUTarget("cuda", gpu, 32), options=options)


AT_RISK = (
    re.compile(r"cvt\.\S*e[45]m[23]x2\.f32"),
    re.compile(r"\b(min|max)\.\S*NaN\S*\.f32"),
    re.compile(r"st\.shared(::cta)?(\.v\d)?\.[bus]8\b"),
)
"""What triton-lang/triton#11111 takes together: FP8 conversions, maxima that keep NaN, bytes to shared memory."""


def measured(compiled: Any) -> Compiled:
    """Return what a compiled variant takes; registers as the cubin states them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    return Compiled(
        warps=compiled.metadata.num_warps,
        shared=compiled.metadata.shared,
        registers=numbers["REG"],
        spilled=numbers["STACK"] + numbers["LOCAL"],
        bytes_at_risk=all(pattern.search(ptx) for pattern in AT_RISK),
    )


NO_CODE = re.compile(r"\s*(\.loc|\.file|\.version)\s|\$L__(tmp|func)|\s*$")
"""Lines of PTX that name lines of the source or the assembler, or are empty."""


def hash_of(ptx: str) -> str:
    """Return the hash of PTX without comments and what debuggers read."""
    lines = [line.partition("//")[0].rstrip() for line in ptx.partition("\t.section\t.debug")[0].splitlines()]
    code = "\n".join(line for line in lines if not NO_CODE.match(line))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


Hashes = dict[tuple[str, str], dict[int, str]]
"""Of code, by kernel and :attr:`Variant.key`, by GPU."""


def recorded() -> tuple[str, Hashes]:
    """Return the Triton of which ``PTX`` has hashes, and these."""
    version, *lines = PTX.read_text().splitlines()
    hashes = {
        (row["kernel"], row["launch"]): {gpu: row[f"sm_{gpu}"] for gpu in RECORDED if row[f"sm_{gpu}"]}
        for row in csv.DictReader(lines)
    }
    return version.rpartition(" ")[2], hashes


def record(version: str, hashes: Hashes) -> None:
    """Write hashes into ``PTX``, and keep those of other launches that the same Triton compiled."""
    before, old = recorded()
    lines = [f"# Triton {version}", ",".join(["kernel", "launch", *(f"sm_{gpu}" for gpu in RECORDED)])]
    for variant in variants():
        key = (variant.kernel, variant.key)
        found = (old.get(key, {}) if before == version else {}) | hashes.get(key, {})
        if found:
            lines.append(",".join([*key, *(found.get(gpu, "") for gpu in RECORDED)]))
    PTX.write_text("\n".join(lines) + "\n")


def contractions(compiled: Any) -> int:
    """Count multiply-adds of floats that the GPU would run."""
    return len(re.findall(r"\b[DFH]FMA\S*", compiled.asm["sass"]))


def main() -> int:
    """Compile, report, and return the number of faults."""
    import triton

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="*", default=list(SHARED_MEMORY))
    parser.add_argument("--kernels", nargs="*", help="only those whose names begin so")
    parser.add_argument(
        "--most", type=int, default=0, help="variants per kernel, spread evenly; all by default"
    )
    parser.add_argument("--each-on-one", action="store_true", help="one GPU per variant, in turn")
    parser.add_argument(
        "--fusion", action="store_true", help="also say where enable_fp_fusion makes a difference"
    )
    parser.add_argument("--table", type=Path, help="write a table for the docs")
    parser.add_argument(
        "--record", action="store_true", help=f"write {PTX.name} instead of comparing with it"
    )
    args = parser.parse_args()
    faults, turn = 0, itertools.cycle(args.gpus)
    of_triton, known = recorded()
    known = known if of_triton == triton.__version__ and not args.record else {}
    hashes: Hashes = {}
    same = 0
    results: dict[str, dict[int, list[Compiled | str]]] = {}
    for kernel, of_kernel in itertools.groupby(variants(args.kernels), key=lambda variant: variant.kernel):
        chosen = list(of_kernel)
        if args.most:
            step = max(len(chosen) / args.most, 1.0)
            chosen = [chosen[int(at * step)] for at in range(min(args.most, len(chosen)))]
        for variant in chosen:
            for gpu in [next(turn)] if args.each_on_one else args.gpus:
                try:
                    compiled = compile_for(variant, gpu)
                    result: Compiled | str = measured(compiled)
                    fault = result.fault(gpu)
                    key, code = (kernel, variant.key), hash_of(compiled.asm["ptx"])
                    hashes.setdefault(key, {})[gpu] = code
                    wanted = known.get(key, {}).get(gpu)
                    same += code == wanted
                    if wanted not in (None, code):
                        fault = fault or f"the code is another than that of {PTX.name}"
                    if args.fusion:
                        counts = (
                            contractions(compiled),
                            contractions(compile_for(variant, gpu, enable_fp_fusion=True)),
                        )
                        if counts[0] != counts[1]:
                            print(f"fusion {kernel} sm_{gpu} {counts[0]} {counts[1]} {variant}", flush=True)
                except Exception as error:
                    result = fault = f"{type(error).__name__}: {str(error).strip()[-300:]}"
                if fault:
                    faults += 1
                    print(f"FAULT {kernel} sm_{gpu}: {fault} {variant}", flush=True)
                results.setdefault(kernel, {}).setdefault(gpu, []).append(result)
        print(kernel, len(chosen), flush=True)
    if args.table:
        args.table.write_text(table(results, args.gpus, triton.__version__))
    if args.record:
        record(triton.__version__, hashes)
    count = sum(len(x) for of in results.values() for x in of.values())
    print(f"{count} compiled, {faults} faults, {same} with the code of {PTX.name}")
    return min(faults, 100)


def table(results: dict[str, dict[int, list[Compiled | str]]], gpus: list[int], version: str) -> str:
    """Return the results as Markdown: per kernel and GPU the most registers and shared memory, or the reason."""
    lines = [
        "# GPUs",
        "",
        "[Versions](versions.md) has the GPUs on which tests ran. Triton compiles the kernels of the others without "
        "one, and the table compares what each needs with the GPU's limits. Kernels in Gluon are only for sm_90; the "
        "general kernels compute the same bits elsewhere.",
        "",
        f"Written by `make kernels` with Triton {version} on {datetime.date.today()}. A cell has the number of "
        "compiled variants, then their largest number of registers per thread (r), KiB of shared memory per block (K) "
        "and bytes spilled per thread (s). If a variant does not run, it has the reason.",
        "",
        "| kernel | " + " | ".join(f"sm_{gpu}" for gpu in gpus) + " |",
        "| --- |" + " --- |" * len(gpus),
    ]
    for kernel, of_gpu in results.items():
        cells = []
        for gpu in gpus:
            found = of_gpu.get(gpu, [])
            faults = sorted({x if isinstance(x, str) else x.fault(gpu) for x in found} - {""})
            fine = [x for x in found if isinstance(x, Compiled)]
            shared, registers, spilled = (
                max((getattr(x, name) for x in fine), default=0)
                for name in ("shared", "registers", "spilled")
            )
            cell = f"{len(found)}: {registers} r, {shared / 1024:.0f} K" + (
                f", {spilled} s" if spilled else ""
            )
            cells.append("; ".join([cell, *faults]) if found else "-")
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
