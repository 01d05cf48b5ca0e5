"""What Inductor writes for an H200 does what eager code does, to the bit; found without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's build for NVIDIA GPUs"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="pretends that there is a GPU: needs a machine without"
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For a process that finds a driver, which answers and does nothing."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))))
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    path = [str(ROOT / "src"), str(ROOT / "tests")]
    return os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "0",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("evaluations, root", "checkpointed, two forwards", "operations", "experts, current"),
        pytest.param(
            (
                *("steps, root", "steps, own", "evaluations, own", "two forwards", "twice"),
                *("checkpointed", "current", "routed", "experts", "experts, block"),
            ),
            marks=pytest.mark.requested,
        ),
    ],
    ids="/".join,
)
def test_compiled_steps_equal_eager_ones(names: tuple[str, ...], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "gpu_code.steps", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{name}: equal" for name in names]
