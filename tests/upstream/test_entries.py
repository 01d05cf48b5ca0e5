"""Every private name that narrowcast uses is there on the releases it was tried on, and is not lost in silence."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from loss import is_stated, outcomes
from torch.torch_version import TorchVersion

import narrowcast.upstream
from narrowcast._installed import minor
from narrowcast.upstream.private import ENTRIES, Entry, _resolve
from narrowcast.upstream.versions import TESTED_TORCH, TESTED_TRITON

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios.py"


def _entries() -> dict[str, Entry]:
    for module in pkgutil.iter_modules(narrowcast.upstream.__path__):
        importlib.import_module(f"narrowcast.upstream.{module.name}")
    return {name: ENTRIES[name] for name in ENTRIES if not name.startswith("a name of")}


def _was_tried_here(entry: Entry) -> bool:
    tested, owner = [minor(release) for release in TESTED_TORCH], torch.__version__
    if entry.name.startswith("triton"):
        triton = pytest.importorskip("triton")
        tested, owner = list(TESTED_TRITON), triton.__version__
    oldest, _, newest = entry.tried.partition("-")
    here = ".".join(owner.split("+")[0].split(".")[:2])
    return TorchVersion(oldest or tested[0]) <= TorchVersion(here) <= TorchVersion(newest or tested[-1])


def _is_path(name: str) -> bool:
    return re.fullmatch(r"(torch|triton|narrowcast)(\.\w+)+", name) is not None


ALL = _entries()
OF_INSTANCES = {
    "torch._ops.OpOverload._op",
    "triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",
}
"""Dotted names that only instances have, or that are found under another module; their files have their tests."""
_OF_A_GROUP = ("test_fsdp.py", "test_groups_of_parameters", "test_without_an_attribute_of_a_group")
TESTED_BY = {
    "FSDPParamGroup.fsdp_params": _OF_A_GROUP,
    "FSDPParamGroup.reduce_grads": _OF_A_GROUP,
    "FSDPParamGroup.mesh_info": _OF_A_GROUP,
    "FSDPParamGroup.post_forward_mesh_info": _OF_A_GROUP,
    "FSDPParamGroup.reshard_after_backward": _OF_A_GROUP,
    "FSDPParamGroup._all_reduce_hook": _OF_A_GROUP,
    "frames of torch.distributed.fsdp.fully_shard": (
        "test_fsdp.py",
        "test_sharding_is_seen_wherever_fsdp_keeps_its_files",
        "test_sharding_by_an_unknown_function",
    ),
    "nn.Module._is_fsdp_managed_module": (
        "test_fsdp.py",
        "test_fsdp_marks_the_modules_whose_parameters_it_writes",
    ),
    "frames of torch.distributed.tensor.parallel's styles": (
        "test_fsdp.py",
        "test_styles_are_seen_when_they_place_a_parameter",
    ),
    "frames of torch/_functorch/_aot_autograd": (
        "test_aot.py",
        "test_compiled_code_is_seen_forward_and_backward",
        "test_without_its_package",
    ),
    "node.meta['val']": ("test_micro_pipeline.py", "test_without_the_value_of_a_node"),
}
"""Entries whose tests do not spell their names: the file, then its tests of the contract and of the loss."""


@pytest.mark.parametrize("name", [name for name in ALL if _is_path(name) and name not in OF_INSTANCES])
def test_the_name_is_there(name: str) -> None:
    """Fails on the rename itself, and names the entry."""
    if not _was_tried_here(ALL[name]):
        return  # a name of other releases
    if name.startswith("torch._C._cuda") and not torch.backends.cuda.is_built():
        return
    try:
        _resolve(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{ALL[name].error()}: {error}")


@pytest.mark.parametrize("name", [name for name in ALL if not _is_path(name)])
def test_what_has_no_path_has_a_test_that_names_it(name: str) -> None:
    if name in TESTED_BY:
        file, *functions = TESTED_BY[name]
        assert all(f"def {function}(" in (HERE / file).read_text() for function in functions)
        return
    tests = [path.read_text() for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    assert any(name in text for text in tests), f"no contract test names {name}"


def test_every_entry_says_what_it_follows_and_what_happens_without_it() -> None:
    assert all(entry.follows and entry.without for entry in ALL.values())


@pytest.mark.requested  # minutes: a process for each name
@pytest.mark.parametrize("scenario", ["eager", "compiled"])
def test_no_name_is_lost_in_silence(scenario: str) -> None:
    """The same bits as with the name, or an ``UpstreamError`` that names it."""
    names = [name for name in ALL if _is_path(name) and name not in OF_INSTANCES and _matters(name, scenario)]
    loaded = ["torch", "torch._dynamo"] if scenario == "compiled" else ["torch"]
    found = outcomes(names, f"{SCENARIOS}:{scenario}", loaded, timeout=1200)
    lost = {name: found[name][-2000:] for name in names if not is_stated(name, found)}
    assert not lost, "\n\n".join(f"{name}: {outcome}" for name, outcome in lost.items())


def _matters(name: str, scenario: str) -> bool:
    """Leave out names that the scenario does not come near, for the time they take."""
    if name.startswith(("triton", "torch.distributed", "torch.ops")):
        return False
    of_compiler = name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))
    return of_compiler if scenario == "compiled" else not of_compiler
