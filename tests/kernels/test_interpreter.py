"""The kernel tests in a process of their own, when this one cannot interpret kernels any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import HAS_GPU, HAS_TRITON, missing


@pytest.mark.slow
@pytest.mark.skipif(
    HAS_GPU or not HAS_TRITON or missing() is None, reason="the kernel tests run in this process"
)
def test_kernels_in_a_fresh_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
