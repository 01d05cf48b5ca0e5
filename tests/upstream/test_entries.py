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
from narrowcast.upstream.private import ENTRIES, Entry, _resolve

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios.py"


def _entries() -> dict[str, Entry]:
    for module in pkgutil.iter_modules(narrowcast.upstream.__path__):
        importlib.import_module(f"narrowcast.upstream.{module.name}")
    return {name: ENTRIES[name] for name in ENTRIES if not name.startswith("a name of")}


def _was_tried_here(entry: Entry) -> bool:
    oldest, _, newest = entry.tried.partition("-")
    owner = torch.__version__
    if entry.name.startswith("triton"):
        triton = pytest.importorskip("triton")
        owner = triton.__version__
    here = ".".join(owner.split("+")[0].split(".")[:2])
    return TorchVersion(oldest) <= TorchVersion(here) <= TorchVersion(newest or oldest)


def _is_path(name: str) -> bool:
    return re.fullmatch(r"(torch|triton|narrowcast)(\.\w+)+", name) is not None


ALL = _entries()
OF_INSTANCES = {
    "torch._ops.OpOverload._op",
    "triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",
}
"""Dotted names that only instances have, or that are found under another module; their files have their tests."""
UNNAMED = {
    "torch.utils.checkpoint._checkpoint_hook and _recomputation_hook: `frame`, `target_frame_ref` and `gid` in the closures of their pack hooks",  # noqa: E501
    "the context of a running torch.autograd.Function, the first argument of `forward` or `backward` on the call stack",
    "FSDPParamGroup.fsdp_params",
    "FSDPParamGroup.reduce_grads",
    "FSDPParamGroup.post_forward_mesh_info",
    "FSDPParamGroup.reshard_after_backward",
    "frames of torch.distributed.fsdp.fully_shard",
    "nn.Module._is_fsdp_managed_module",
    "frames of torch.distributed.tensor.parallel's styles",
    "frames of torch/_functorch/_aot_autograd",
    "node.meta['val']",
}
"""Entries that no contract test names yet; the list only shrinks."""


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
    tests = [path.read_text() for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    assert name in UNNAMED or any(name in text for text in tests), f"no contract test names {name}"


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
