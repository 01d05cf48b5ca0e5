"""What every test gets: fixed seeds, few threads, a clean compiler, and skips that say what is missing."""

from __future__ import annotations

import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from interpreting import fast_interpreter
from ranks import collect_garbage_less, process_group_removed

FLOAT32 = {
    "distributed/test_shard.py": "the shares of memory are of fp32 weights",
    "distributed/test_shard_of_two.py": "PyTorch adds to 16 bf16 elements with other roundings than to 32",
    "functional/test_kept_weights.py": "NumPy and the fused SGD of PyTorch 2.11 write no bf16 weight",
    "reference/test_activation.py": "the functions are of fp32, and so are their bounds",
    "serving/test_forward_like.py": "the engines' operands and products are told apart in fp32 alone",
}
"""Files of tests that run under float32 as default dtype, whatever ``--default-dtype`` is, and why."""

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--threads", type=int, default=1, help="CPU threads of PyTorch in each test process (default 1)"
    )
    parser.addoption(
        "--default-dtype",
        default="float32",
        help="torch.set_default_dtype of the whole run (default float32)",
    )
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every combination of the tests marked covering, not only one for every two values",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("COLUMNS", None)  # pytest-xdist makes a terminal of 80 columns for its workers
    torch.set_num_threads(config.getoption("--threads"))
    torch.set_default_dtype(getattr(torch, config.getoption("--default-dtype")))


@pytest.hookimpl(trylast=True)  # after -k and -m: what they leave is what must hold every pair
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu": _missing_gpu(), "inductor": _missing_compiler()}
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--full-matrix"):
        _thin_out(config, items)


def pytest_collection_finish() -> None:
    collect_garbage_less()


def _thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test marked ``covering(strength)`` keep combinations that hold every two, or each, of their values.

    Those marked ``requested`` are left out.
    """
    matrices: dict[Any, list[pytest.Function]] = {}
    unneeded: set[pytest.Item] = {item for item in items if item.get_closest_marker("requested")}
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None and isinstance(item, pytest.Function) and item not in unneeded:
            matrices.setdefault((item.path, item.originalname, *marker.args), []).append(item)
    for (_, _, *strength), combinations in matrices.items():
        rows = [tuple(map(_value_key, one.callspec.params.values())) for one in combinations]
        unneeded |= set(combinations) - {combinations[index] for index in covering(rows, *strength)}
    config.hook.pytest_deselected(items=[item for item in items if item in unneeded])
    items[:] = [item for item in items if item not in unneeded]


def _value_key(value: Any) -> Hashable:
    """What tells a parameter from the others: its value, or which object it is where values cannot be compared."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _missing_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    return f"needs an NVIDIA GPU: none is visible to torch {torch.__version__}"


def _missing_compiler() -> str | None:
    """What inductor needs to compile CPU code and this machine does not have."""
    named = os.environ.get("CXX")
    compilers = (named,) if named else ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in compilers):
        return f"needs a C++ compiler: no {' or '.join(compilers)} on the path"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"needs the headers of Python: no Python.h in {headers}"
    return None


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    with fast_interpreter():
        yield


@pytest.fixture(scope="module", autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """float32 for the tests that are about it, under another ``--default-dtype``."""
    before = torch.get_default_dtype()
    if request.path.relative_to(Path(__file__).parent).as_posix() in FLOAT32:
        torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in every run, whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Forget compiled code after each test: recompilation limits and counters must not leak into the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_autocast_left() -> Iterator[None]:
    """End the step: graphs of the next test did not run under the autocasts of this one."""
    yield
    if "narrowcast.layers.recipe_owner" in sys.modules:
        sys.modules["narrowcast.layers.recipe_owner"].forget_autocasts()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A test that fails between creating a process group and destroying it fails alone."""
    with process_group_removed():
        yield


@pytest.fixture
def device() -> torch.device:
    """The accelerator when there is one, else the CPU: for tests that must hold on both."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
