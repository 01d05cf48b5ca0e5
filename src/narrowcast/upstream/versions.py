"""The releases that narrowcast is tested with, and the GPUs; imports nothing.

The only place that names them. ``.ci/release`` prints them for the build files; ``narrowcast doctor``,
``nc.show_versions()`` and error messages read them; ``docs/versions_tables.py`` writes them into README,
``docs/versions.md`` and ``requirements.txt``, and the last GPU tests into this file. A test compares all of them
and ``pyproject.toml``.
"""

from __future__ import annotations

TESTED_TORCH = {
    "2.11.0": "3.6.0",
    "2.12.0": "3.7.0",
    "2.13.0": "3.9.0",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}
"""Releases of PyTorch, oldest first, each with the Triton that it was tested with."""
OLDEST_TORCH, *_, NEWEST_TORCH = TESTED_TORCH
TESTED_TRITON = ("3.6", "3.7", "3.8", "3.9")
TESTED_PYTHON = {
    "3.10": "2.14.1",  # PyTorch 2.15 is not there for it
    "3.11": NEWEST_TORCH,
    "3.12": NEWEST_TORCH,
    "3.13": NEWEST_TORCH,
}
"""Releases of Python, oldest first, each with the newest PyTorch that it was tested with."""
OLDEST_PYTHON, *_, NEWEST_PYTHON = TESTED_PYTHON

SUPPORTED_RELEASES = 5
"""How many minor releases of PyTorch are supported: the newest that was tested and those before it."""

NOT_WORKING = {
    "PyTorch 2.10 and older": "`pip` refuses them: compiled graphs carry quantizers as values, which came with 2.11",
    "Python 3.9 and older": "`pip` refuses them: the code has syntax of Python 3.10",
    "PyTorch 2.11": "several threads that compile at the same time may crash the process; "
    "so may loading one of two AOTInductor packages on a GPU; Inductor may fail to partition a compiled checkpoint "
    "that calls `torch.rand` behind a norm ([pytorch#177396](https://github.com/pytorch/pytorch/pull/177396)); after a "
    "checkpointed function raised, a backward in the handler runs it again "
    "(`findings/torch-failed-checkpoint-keeps-its-hooks.sh`)",
    "PyTorch 2.11 and 2.12": "an `autocast` entered inside a compiled checkpoint raises an error that says so; "
    "pipeline schedules that split the backward, such as `ScheduleInterleavedZeroBubble`, fail inside PyTorch",
    "PyTorch 2.11 to 2.13": "`torch.optim.SGD(fused=True)` on a CPU leaves most of a bf16 or fp16 weight as it was "
    "([pytorch#191763](https://github.com/pytorch/pytorch/issues/191763))",
    "PyTorch 2.11 to 2.15": "eager `torch.nn.LayerNorm` on a CPU sums the gradients of its parameters in bf16, where "
    "they stop at 256 per thread (`findings/torch-layer-norm-on-cpu-stops-at-256.sh`), unless `convert(norms=True)` or "
    "`torch.compile` runs it",
}
"""What is known not to work, and why."""

GPUS = {
    (8, 0): "A100",
    (8, 9): "L40S, RTX 40",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (10, 3): "B300",
    (12, 0): "RTX 50",
}
"""Compute capabilities, each with some GPUs."""

COMPILED = ((8, 9), (9, 0), (10, 0), (12, 0))
"""Compute capabilities for which Triton compiles every kernel, on a machine without such a GPU."""

# From the last line "summary:" for each compute capability in benchmarks/results/gpu_tests_*.log.
GPU_TESTS = {
    (9, 0): {
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "date": "2026-11-30",
        "commit": "ad40cce3",
        "passed": "1399",
        "failed": "0",
        "not run": "64 tests",
    },
}
"""Compute capabilities, each with the last whole run of the GPU tests; "not run" are skipped and unfinished ones."""
