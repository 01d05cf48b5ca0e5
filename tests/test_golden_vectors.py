"""The vectors are complete and are what their generator writes."""

import re
from pathlib import Path

import golden_vectors
import numpy as np
import pytest


def test_the_manifest_names_exactly_the_files() -> None:
    manifest = (golden_vectors.VECTORS / "MANIFEST.md").read_text()
    listed = re.findall(r"^- \*\*(\w+)\*\*", manifest, flags=re.MULTILINE)
    assert len(listed) == 114
    assert sorted(listed) == golden_vectors.names("")


def test_the_generator_reproduces_every_byte(tmp_path: Path) -> None:
    make_golden = golden_vectors.oracle()
    for name, _, arrays in make_golden.generate(make_golden.DEFAULT_SEED, str(tmp_path)).rows:
        with np.load(golden_vectors.VECTORS / f"{name}.npz") as stored:
            for key, array in arrays.items():
                assert stored[key].dtype == array.dtype
                assert stored[key].tobytes() == array.tobytes(), f"{name}: {key}"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        golden_vectors.load("fp8_current_e4m3_normall")
