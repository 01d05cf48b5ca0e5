"""Where the kernels run: on the GPU, or on CPU tensors in Triton's interpreter, which must be chosen before Triton is
imported. In a process that already imported it, these tests skip and ``test_interpreter`` runs them in another one."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not HAS_GPU and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETING = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str | None:
    """Why the kernels cannot run in this process, if they cannot."""
    if not HAS_TRITON:
        return "needs triton (pip install triton), which is not installed"
    if not (HAS_GPU or INTERPRETING):
        return "Triton was imported before its interpreter was chosen; test_interpreter runs this in a fresh process"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if (
            reason
            and "kernels" in item.path.parts
            and item.path.stem not in ("test_interpreter", "test_package")
        ):
            item.add_marker(pytest.mark.skip(reason=reason))
