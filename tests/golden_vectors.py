"""Loads the golden vectors in ``golden/vectors``; their README.md describes every array and how to compare it."""

import functools
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

VECTORS = Path(__file__).parent / "golden" / "vectors"


@dataclass(frozen=True)
class Golden:
    """One file: its settings and its arrays as CPU tensors of the stored dtype (shared between tests: never write)."""

    name: str
    meta: dict[str, Any]
    arrays: dict[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        return self.arrays[key]

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def input(self, key: str = "x") -> Tensor:
        """An input in the dtype the file is meant for: bf16, which holds the values exactly, or fp32."""
        dtype = torch.float32 if self.meta.get("input_dtype") == "fp32" else torch.bfloat16
        return self.arrays[key].to(dtype)

    def valid(self, key: str, buffer: Tensor) -> Tensor:
        """The corner of a scale buffer that the format defines; the rest is padding."""
        rows, columns = self.meta["valid_scale_shape"][key]
        return buffer[:rows, :columns]


def names(*prefixes: str, without: tuple[str, ...] = ()) -> list[str]:
    """The names of the files that start with one of the prefixes and with none of ``without``, sorted."""
    stems = sorted(path.stem for path in VECTORS.glob("*.npz"))
    return [
        stem for stem in stems if stem.startswith(prefixes) and not (without and stem.startswith(without))
    ]


@functools.cache
def load(name: str) -> Golden:
    """Read one file by its name without suffix."""
    with np.load(VECTORS / f"{name}.npz") as stored:
        arrays = {key: torch.from_numpy(stored[key]) for key in stored.files if key != "meta"}
        return Golden(name, json.loads(str(stored["meta"])), arrays)


@functools.cache
def oracle() -> ModuleType:
    """The NumPy implementation that wrote the vectors; skips the test where its ml_dtypes is missing."""
    pytest.importorskip("ml_dtypes")
    spec = importlib.util.spec_from_file_location("make_golden", VECTORS / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
