"""Where the kernels run: on the GPU, or on CPU tensors in Triton's interpreter, which ``tests/conftest.py`` chooses."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETING = HAS_TRITON and not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_TRITON:
        return
    for item in items:
        if "kernels" in item.path.parts and item.path.stem != "test_package":
            item.add_marker(
                pytest.mark.skip(reason="needs triton (pip install triton), which is not installed")
            )


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """The interpreter searches ``triton.language`` for built-ins at every call of a device function: search it once.

    That is a quarter of the interpreter's time.
    """
    if not INTERPRETING:
        yield
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def getmembers(package: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(package, name)) for name in names_of_builtins(package)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "inspect", SimpleNamespace(**{**vars(inspect), "getmembers": getmembers}))
        yield
