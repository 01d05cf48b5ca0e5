"""Where the kernels run: on the GPU, or on CPU tensors in Triton's interpreter, which ``tests/conftest.py`` chooses."""

from __future__ import annotations

import pytest
from interpreting import HAS_TRITON


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_TRITON:
        return
    for item in items:
        if "kernels" in item.path.parts and item.path.stem != "test_package":
            item.add_marker(
                pytest.mark.skip(reason="needs triton (pip install triton), which is not installed")
            )
