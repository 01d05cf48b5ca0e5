"""What ``async_tensor_parallel`` uses of Inductor and symmetric memory: there, and what happens where it is not."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from narrowcast.upstream.private import ENTRIES, Absent, UpstreamError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture
def upstream() -> Any:
    from narrowcast.upstream import micro_pipeline

    return micro_pipeline


def test_everything_is_there(upstream: Any) -> None:
    names = ("hash_of_files", "_config", "_enable", "_workspace", "_unsafe_view", "_scaled_product")
    assert not [name for name in names if isinstance(getattr(upstream, name), Absent)]
    assert upstream.GraphPass is not object
    assert hasattr(upstream._config, "_micro_pipeline_tp") and callable(upstream._enable)
    node, value = torch.fx.Graph().placeholder("x"), torch.ones(1)
    upstream.set_value(node, value)
    assert upstream.value_of(node) is value is node.meta["val"]


@pytest.mark.parametrize("name", ["_micro_pipeline_tp", "post_grad_custom_pre_pass"])
def test_without_an_option(name: str, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"_micro_pipeline_tp": False, "post_grad_custom_pre_pass": None}
    del options[name]
    monkeypatch.setattr(upstream, "_config", types.SimpleNamespace(**options))
    with pytest.raises(UpstreamError, match=f"{name}.*without narrowcast.distributed.async_tensor_parallel"):
        upstream.turn_on(None, type(None))


@pytest.mark.parametrize("name", ["hash_of_files", "_enable", "_workspace"])
def test_without_a_function(name: str, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        "hash_of_files": "torch._inductor.custom_graph_pass.get_hash_for_files",
        "_enable": "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
        "_workspace": "torch.distributed._symmetric_memory.get_symm_mem_workspace",
    }
    for other in paths:
        monkeypatch.setattr(upstream, other, lambda *args, **kwargs: None)
    monkeypatch.setattr(upstream, name, Absent(ENTRIES[paths[name]]))
    use = upstream.turn_on if name == "hash_of_files" else upstream.start_symmetric_memory
    with pytest.raises(UpstreamError, match=paths[name]):
        use(*(None, type(None)) if name == "hash_of_files" else ("group",))


def test_without_the_value_of_a_node(upstream: Any) -> None:
    with pytest.raises(UpstreamError, match=r"node.meta\['val'\]"):
        upstream.value_of(torch.fx.Graph().placeholder("x"))
