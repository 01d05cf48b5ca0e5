"""What a file can do: nothing that is read runs code, and no size is believed before it was checked."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizers.catalog import ONE_OF_EACH, quantize
from reference.checks import normal

import narrowcast as nc
from narrowcast.tensors.quantized_tensor import rebuild_quantized_tensor
from narrowcast.train.checkpoint import DamagedCheckpoint, _sum_of, load, load_newest, save

SOURCES = Path(nc.__file__).parent
RUN = {"eval", "exec", "compile", "__import__", "import_module"}
# its unpickler calls nothing of the file's choice: test_extra_state.py plants a function
RESTRICTED = "layers/extra_state.py"
# it runs what it has composed of its own names and numbers: test_replay.py gives it text that would be code
COMPOSED = "functional/replay.py"
UNPICKLE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


def test_no_line_of_the_package_unpickles_or_evaluates() -> None:
    found = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
            unpickles = isinstance(node, ast.Import) and UNPICKLE & {
                name.name.partition(".")[0] for name in node.names
            }
            if unpickles and str(path.relative_to(SOURCES)) != RESTRICTED:
                found.append(place)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLE:
                found.append(place)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                safe = called == "torch.load" and given.get("weights_only") == "True"
                composed = called in ("exec", "compile") and str(path.relative_to(SOURCES)) == COMPOSED
                if (called in RUN and not composed) or (
                    called in ("torch.load", "numpy.load", "np.load") and not safe
                ):
                    found.append(place)
    assert found == []


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forge(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint and make every sum right again, as one who means harm would."""
    description = json.loads((path / "checkpoint.json").read_text())
    del description["sha256"]
    if name != "checkpoint.json":
        (path / name).write_bytes(content)
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        description["files"][name.removesuffix(".safetensors")] = entry
        description["sha256"] = _sum_of(description)
        content = json.dumps(description).encode()
    (path / "checkpoint.json").write_bytes(content)


def header_of_a_giant() -> bytes:
    entry = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    header = json.dumps(entry).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pickle", "torch.save", "a giant", "a giant header"])
def test_a_forged_checkpoint_runs_nothing_and_allocates_nothing(name: str, kind: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    saved = io.BytesIO()
    torch.save(Planted(planted), saved)
    content = {
        "pickle": pickle.dumps(Planted(planted)),
        "torch.save": saved.getvalue(),
        "a giant": header_of_a_giant(),
        "a giant header": struct.pack("<Q", 2**60) + b"{}",
    }[kind]
    for step in (1, 2):
        path = save(tmp_path, step=step, meta={}, tensors={"model": {"w": torch.ones(3)}})
    forge(path, name, content)
    with pytest.raises(DamagedCheckpoint):
        load(path)
    assert load_newest(tmp_path)[0].step == 1
    assert not planted.exists()


def test_weights_only_refuses_code(tmp_path: Path) -> None:
    """What the package declares safe for `torch.load(weights_only=True)` opens no door."""
    file = tmp_path / "file.pt"
    torch.save(
        {
            "weight": quantize(ONE_OF_EACH["mxfp8"], normal((32, 64), torch.bfloat16)),
            "x": Planted(tmp_path / "planted"),
        },
        file,
    )
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(file, weights_only=True)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_buffers_that_are_too_small_are_refused(name: str) -> None:
    """A kernel believes the shape: a file whose data are shorter would make it read what is not its own."""
    tensor: Any = quantize(ONE_OF_EACH[name], normal((32, 64), torch.bfloat16))
    for argument, value in tensor.get_metadata().items():
        if isinstance(value, torch.Tensor) and value.numel():
            for wrong in (value.new_empty(value.numel() + 1), value.double()):
                metadata = {**tensor.get_metadata(), argument: wrong}
                with pytest.raises(
                    ValueError, match=r"the file's \w+ of shape \(32, 64\) has _\w+ .* is damaged"
                ):
                    rebuild_quantized_tensor(type(tensor), metadata, False)
    larger = {**tensor.get_metadata(), "shape": (2**20, 2**20)}
    with pytest.raises(ValueError, match=r"of shape \(1048576, 1048576\) has .* the file is damaged"):
        rebuild_quantized_tensor(type(tensor), larger, False)
    with pytest.raises(ValueError, match="was not saved by narrowcast"):
        rebuild_quantized_tensor(dict, {}, False)  # type: ignore[arg-type]


def test_recipes_of_json_are_data() -> None:
    for text in ('{"": {"type": "os.system"}}', '{"": {"type": "CustomRecipe", "qfactory": "print"}}'):
        with pytest.raises((ValueError, TypeError), match="recipe type|CustomRecipe"):
            nc.recipe.recipes_from_json(text)
