"""The kernels' package with and without Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from narrowcast import kernels

from .conftest import HAS_TRITON


def test_available_where_triton_is() -> None:
    assert kernels.AVAILABLE == HAS_TRITON
    for name in kernels.MODULES:
        assert (getattr(kernels, name) is not None) == HAS_TRITON


def test_imports_without_triton() -> None:
    script = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from narrowcast import kernels\n"
        "assert not kernels.AVAILABLE and kernels.float8 is None and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_refuses_what_no_kernel_reaches() -> None:
    script = (
        "import torch; from narrowcast import kernels; from narrowcast.formats import E4M3\n"
        "try: kernels.mx.quantize(torch.ones(4, 4), E4M3, rowwise=True, columnwise=True)\n"
        "except ValueError as error: assert 'CUDA' in str(error) and 'TRITON_INTERPRET' in str(error)\n"
        "else: raise SystemExit('accepted a CPU tensor')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=_without_interpreter())


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
