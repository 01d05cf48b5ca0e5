"""The kernels' package with and without Triton."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from narrowcast import kernels

from .conftest import HAS_TRITON
from .cross_compile import LAUNCHES


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


def _reach(function: Any, found: dict[str, list[Any]]) -> None:
    """Add the globals that a kernel's code reads, by name, and those of the device functions among them."""
    for name in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(name)
        value = getattr(value, "value", value)  # of a constant
        if value is None or isinstance(value, types.ModuleType) or value in found.setdefault(name, []):
            continue
        found[name].append(value)
        if hasattr(value, "fn"):
            _reach(value, found)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_name_that_a_kernel_reaches_means_one_thing() -> None:
    """In whichever files: Inductor copies all into one, and of two constants or functions of a name the first alone."""
    for kernel in json.loads(LAUNCHES.read_text()):
        module, name = kernel.split(".")
        found: dict[str, list[Any]] = {}
        _reach(getattr(importlib.import_module(f"narrowcast.kernels.{module}"), name), found)
        assert not {name: values for name, values in found.items() if len(values) > 1}, kernel


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
