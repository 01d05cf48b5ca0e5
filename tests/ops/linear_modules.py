"""Comparing linear operations with the modules that do the same."""

from __future__ import annotations

from modules import assert_same
from recipes import DEVICE
from torch import Tensor

from narrowcast.testing import assert_close


def assert_as_module(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit; but on a GPU, PyTorch may choose other GEMMs for its own backward in high precision."""
    if name == "none" and DEVICE == "cuda":
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key], "bf16_output")
    else:
        assert_same(ours, theirs)
