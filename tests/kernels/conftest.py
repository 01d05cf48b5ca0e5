"""Where the kernels run: on the GPU, or on CPU tensors in Triton's interpreter, which ``tests/conftest.py`` chooses."""

from __future__ import annotations

import importlib.util

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
