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
from torch.distributed.checkpoint import CheckpointException

import narrowcast as nc
from narrowcast.distributed import load_checkpoint, save_checkpoint
from narrowcast.tensors.quantized_tensor import rebuild_quantized_tensor
from narrowcast_tools.train.checkpoint import DamagedCheckpoint, _sum_of, load, load_newest, save

SOURCES = Path(nc.__file__).parents[1]
RUN = {"eval", "exec", "compile", "__import__", "import_module"}
# their unpicklers call nothing of the file's choice: test_extra_state.py and the tests below plant functions
RESTRICTED = ("narrowcast/layers/extra_state.py", "narrowcast/distributed/checkpoint_reader.py")
# it writes what Transformer Engine reads
WRITTEN = "narrowcast/compat/checkpoint.py"
# it runs what it has composed of its own names and numbers: test_replay.py gives it text that would be code
COMPOSED = "narrowcast/functional/replay.py"
# it imports the module of a command that it declares itself
COMMANDS = "narrowcast_tools/cli/commands.py"
UNPICKLING = {"torch.load", "numpy.load", "np.load", "torch.hub.load", "torch.package.PackageImporter"}
UNPICKLING |= {"pickle.load", "pickle.loads", "pickle.Unpickler"}
# PyTorch's: they unpickle .metadata, values that are no tensors, or both
UNPICKLING_METHODS = {
    "FileSystemReader",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
    "load_state_dict_from_keys",
}
UNPICKLE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


def name_of(called: ast.expr) -> str:
    """``a.b.c``, and ``.b.c`` of what is called on a result."""
    names = []
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    names.append(called.id if isinstance(called, ast.Name) else "")
    return ".".join(reversed(names))


def test_no_line_of_the_package_unpickles_or_evaluates() -> None:
    found = []
    for path in SOURCES.glob("narrowcast*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}"
            unpickles = isinstance(node, ast.Import) and UNPICKLE & {
                name.name.partition(".")[0] for name in node.names
            }
            if unpickles and str(path.relative_to(SOURCES)) not in (*RESTRICTED, WRITTEN):
                found.append(place)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLE:
                found.append(place)
            if isinstance(node, ast.Call):
                called = name_of(node.func)
                weights_only = any(
                    keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is True
                    for keyword in node.keywords
                )
                safe = called == "torch.load" and weights_only
                composed = called in ("exec", "compile") and str(path.relative_to(SOURCES)) == COMPOSED
                composed |= called == "import_module" and str(path.relative_to(SOURCES)) == COMMANDS
                unpickles = called in UNPICKLING or called.rpartition(".")[2] in UNPICKLING_METHODS
                if (called in RUN and not composed) or (unpickles and not safe):
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


DELAYED = '{"": {"type": "DelayedScaling", %s}}'
CURRENT = '{"": {"type": "Float8CurrentScaling", %s}}'
QPARAMS = CURRENT % '"fp8_quant_fwd_inp": {"type": "QParams", "amax_epsilon": %s}'


@pytest.mark.parametrize(
    "text, match",
    [
        ('{"": {"type": "os.system"}}', "has recipe type 'os.system'; use one of"),
        ('{"": {"type": "Recipe"}}', "has recipe type 'Recipe'; use one of"),
        ('{"": {"type": ["x"]}}', r"has recipe type \['x'\]; use one of"),
        ('{"": 3}', r"^'' is 3; use a name, null or an object with a \"type\"$"),
        (
            DELAYED % '"amax_history_len": 1000000000000',
            "amax_history_len is 1000000000000; use a whole number from 1 to 1048576",
        ),
        (DELAYED % '"amax_history_len": 1.5', "amax_history_len is 1.5; use an int"),
        (DELAYED % '"amax_history_len": true', "amax_history_len is True; use an int"),
        (DELAYED % '"margin": 100000000000', "margin is 100000000000; use a whole number from -32 to 32"),
        (DELAYED % '"amax_compute_algo": []', r"amax_compute_algo is \[\]; use a str"),
        (DELAYED % '"amax_compute_algo": "print"', "amax_compute_algo is 'print'"),
        (DELAYED % '"margin": 1, "margin": 2', "'margin' stands in an object twice"),
        ('{"a": null, "a": {"type": "MXFP8BlockScaling"}}', "'a' stands in an object twice"),
        (DELAYED % '"fp8_format": "E9"', "fp8_format is 'E9'; use one of"),
        (DELAYED % '"fp8_format": {"a": 1}', "fp8_format is {'a': 1}; use one of"),
        (DELAYED % '"no": 1', "DelayedScaling has no field 'no'"),
        (QPARAMS % "NaN", "NaN is no number of JSON"),
        (QPARAMS % "-Infinity", "Infinity is no number of JSON"),
        (QPARAMS % "1e999", "amax_epsilon is inf; use an int or a float"),
        (QPARAMS % "-1", "amax_epsilon is -1; use a finite number"),
        (QPARAMS % '"x"', "amax_epsilon is 'x'; use an int or a float"),
        (CURRENT % '"fp8_quant_fwd_inp": 3', "use an object with the type 'QParams'"),
        (CURRENT % '"fp8_quant_fwd_inp": {"type": "MMParams"}', "is MMParams; use QParams"),
        (
            CURRENT % '"fp8_quant_fwd_inp": {"type": "x"}',
            "has type 'x'; use one of 'MMParams', 'QParams'$",
        ),
        (
            CURRENT % '"fp8_quant_fwd_inp": {"a": 1}',
            r'has no "type"; use one of .*, as in {"type": "MMParams"}$',
        ),
        (CURRENT % '"fp8_gemm_fprop": null', "use an object with the type 'MMParams'"),
        ("[]", "the recipes are a JSON list"),
        ("{", "the recipes are not JSON"),
        ("[" * 100_000, "the recipes are not JSON"),
        ('{"a":' * 100_000, "the recipes are not JSON"),
        (" " * (2**24 + 1), "more than the 16777216 that are read"),
    ],
)
def test_recipes_of_json_are_data(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        nc.recipe.recipes_from_json(text)


WRITE = r'write an object from patterns to recipes, such as \{"": "current"\}$'


@pytest.mark.parametrize(
    "text, match",
    [
        ("", r"not JSON: Expecting value: .*; " + WRITE),
        ("recipes.json", r"not JSON: .*; pass the text of the file$"),
        ('"current"', "the recipes are a JSON str; " + WRITE),
        (DELAYED % '"amax_history": 3', "has no field 'amax_history'; it has amax_history_len$"),
        (DELAYED % '"no": 3', "has no field 'no'; it has amax_compute_algo, amax_history_len, "),
        (
            '{"": {"type": "Float8CurrentScalin"}}',
            "'Float8CurrentScalin'; the nearest: 'Float8CurrentScaling'; use one of 'delayed', .*'rowwise_with_gw_hp'$",
        ),
        ('{"": ["current"]}', r"^'' is \['current'\]; use a name, null or an object with a \"type\"$"),
        (
            '{"0": {"recipe": "current"}}',
            r"""^'0' has no "type"; did you mean "type" for 'recipe'\? use one of 'de""",
        ),
        (
            '{"0": {}}',
            r"""^'0' has no "type"; use one of .*'rowwise_with_gw_hp', as in {"type": "delayed"}$""",
        ),
        ('{"type": "DelayedScaling"}', r'For a recipe of all layers write \{"": \{"type": \.\.\.\}\}$'),
        (None, "text is None, of type NoneType; pass the text of recipes_to_json, or " + WRITE),
    ],
)
def test_what_is_wrong_in_a_json_of_recipes_has_a_remedy(text: Any, match: str) -> None:
    with pytest.raises(TypeError if text is None else ValueError, match=match) as raised:
        nc.recipe.recipes_from_json(text)
    assert len(str(raised.value)) <= 300


def test_recipes_with_functions_have_no_json() -> None:
    with pytest.raises(ValueError, match="CustomRecipe has no JSON"):
        nc.recipe.recipes_from_json('{"": {"type": "CustomRecipe", "qfactory": "print"}}')
    own = nc.recipe.DelayedScaling(amax_compute_algo=lambda history, amax: history)
    with pytest.raises(
        TypeError, match="^'mlp': DelayedScaling.amax_compute_algo is a function <lambda>, which has"
    ):
        nc.recipe.recipes_to_json({"mlp": own})


# -- checkpoints of torch.distributed.checkpoint -----------------------------------------------------------------------


def sharded(folder: Path) -> Path:
    """A checkpoint with delayed scaling, an optimizer, and ``extra`` in the form of now and of earlier versions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer = layer_and_optimizer()
    save_checkpoint(folder / "new", model, optimizer, extra={"step": 3})
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "extra": {"step": 3, "note": "old"},
    }
    dcp.save(state, checkpoint_id=folder / "old", no_dist=True)
    return folder


def layer_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nc.Linear(32, 16, device="cpu", recipe=nc.recipe.DelayedScaling(amax_history_len=4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


def described(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def replace_value(path: Path, key: str, content: bytes) -> None:
    """Put other bytes in the place of one value, and say so in the description."""
    metadata = described(path)
    (path / "planted.distcp").write_bytes(content)
    index = next(one for one in metadata.storage_data if one.fqn == key)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "planted.distcp", 0, len(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def refuses(path: Path, planted: Path, match: str) -> None:
    model, optimizer = layer_and_optimizer()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(BaseException, match=match) as raised:  # CheckpointException is no Exception
        load_checkpoint(path, model, optimizer)
    assert isinstance(raised.value, (ValueError, CheckpointException)), raised.value
    assert not planted.exists(), "the checkpoint ran code"
    for key, value in model.state_dict().items():
        if "amax" not in key and "scale" not in key:
            assert value.shape == before[key].shape


@pytest.mark.parametrize("name", ["new", "old"])
@pytest.mark.parametrize("place", ["all", "planner_data", "storage_data", "storage_meta", "version", "size"])
def test_the_description_of_a_sharded_checkpoint_runs_nothing(name: str, place: str, tmp_path: Path) -> None:
    path, planted = sharded(tmp_path) / name, tmp_path / "planted"
    metadata: Any = described(path)
    if place == "all":
        metadata = Planted(planted)
    elif place == "planner_data":
        metadata.planner_data["x"] = Planted(planted)
    elif place == "size":
        metadata.state_dict_metadata["model.weight"].size = Planted(planted)
    elif place == "storage_data":
        metadata.storage_data[next(iter(metadata.storage_data))] = Planted(planted)
    else:
        setattr(metadata, place, Planted(planted))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(path, planted, r"it names pathlib.*\.touch|it names builtins.getattr|it names pathlib")


@pytest.mark.parametrize("pickled", ["torch.save", "pickle"])
@pytest.mark.parametrize(
    "name, key",
    [
        ("new", "extra"),
        ("old", "extra.step"),
        ("old", "model.weight"),
        ("new", "model.scale"),
        ("new", "optimizer.state.weight.exp_avg"),
        ("new", "optimizer.param_groups.0.lr"),
    ],
)
def test_no_value_of_a_sharded_checkpoint_runs_code(
    name: str, key: str, pickled: str, tmp_path: Path
) -> None:
    path, planted = sharded(tmp_path) / name, tmp_path / "planted"
    written = io.BytesIO()
    if pickled == "torch.save":
        torch.save(Planted(planted), written)
    else:
        written.write(pickle.dumps(Planted(planted)))
    metadata = described(path)
    extent = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    replace_value(path, key, written.getvalue().ljust(extent.length, b"\0"))
    refuses(path, planted, "could run code|PytorchStreamReader|failed")


def test_what_is_packed_in_extra_runs_no_code(tmp_path: Path) -> None:
    """``extra`` is bytes in the checkpoint, which are read in the same way once more."""
    path, planted = sharded(tmp_path) / "new", tmp_path / "planted"
    inner, outer = io.BytesIO(), io.BytesIO()
    torch.save({"step": Planted(planted)}, inner)
    torch.save(inner.getvalue(), outer)
    replace_value(path, "extra", outer.getvalue())
    refuses(path, planted, "could run code")
    torch.save(["no", "dict"], outer := io.BytesIO())
    replace_value(path, "extra", outer.getvalue())
    refuses(path, planted, "is not what save_checkpoint writes")


@pytest.mark.parametrize(
    "damage",
    [
        "a giant",
        "a giant history",
        "a file above",
        "a device",
        "a part too many",
        "cut",
        "bytes",
        "a description of 2 GiB",
    ],
)
def test_sizes_of_a_sharded_checkpoint_are_checked(damage: str, tmp_path: Path) -> None:
    path = sharded(tmp_path) / "new"
    metadata: Any = described(path)
    weight = metadata.state_dict_metadata["model.weight"]
    index = next(one for one in metadata.storage_data if one.fqn == "model.weight")
    match = "is not a checkpoint that load_checkpoint reads"
    if damage == "a giant":
        weight.size = weight.chunks[0].sizes = torch.Size([2**40, 32])
    elif damage == "a giant history":
        history = metadata.state_dict_metadata["model.amax_history"]
        history.size = history.chunks[0].sizes = torch.Size([2**40, history.size[1]])
    elif damage == "a file above":
        metadata.storage_data[index].relative_path = "../new/__0_0.distcp"
    elif damage == "a device":
        (path / "zero").symlink_to("/dev/zero")
        metadata.storage_data[index].relative_path = "zero"
    elif damage == "a part too many":
        weight.chunks.append(weight.chunks[0])
    elif damage == "cut":
        file = path / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:1000])
    content = pickle.dumps(metadata)
    if damage == "bytes":
        content = b"\x80\x02]q\x00(K\x01"
    (path / ".metadata").write_bytes(content)
    if damage == "a description of 2 GiB":
        with (path / ".metadata").open("r+b") as file:
            file.truncate(2**31)
    refuses(path, tmp_path / "planted", match)
