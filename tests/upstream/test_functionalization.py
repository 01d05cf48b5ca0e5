"""Functionalization's tensors, modes and tags."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils.checkpoint import CheckpointPolicy

from narrowcast.upstream import functionalization as upstream
from narrowcast.upstream.private import UpstreamError


def test_state_keys_tell_storages_and_writes_apart() -> None:
    """By ``FunctionalTensor.elem``."""
    x, y = (SimpleNamespace(elem=torch._to_functional_tensor(torch.ones(4))) for _ in range(2))
    torch._enable_functionalization(reapply_views=True)
    try:
        before, view = upstream.state_key(x), SimpleNamespace(elem=x.elem.view(2, 2))
        assert before == upstream.state_key(x) == upstream.state_key(view) != upstream.state_key(y)
        x.elem.add_(1)
        assert upstream.state_key(x) != before
    finally:
        torch._disable_functionalization()
    with pytest.raises(UpstreamError, match=r"FunctionalTensor\.elem"):
        upstream.state_key(torch.ones(1))


def test_the_mode_says_whether_a_graph_is_exported() -> None:
    """By ``FunctionalTensorMode.export``."""
    assert upstream.is_export(upstream.FunctionalMode(export=True))
    assert not upstream.is_export(upstream.FunctionalMode())
    with pytest.raises(UpstreamError, match=r"FunctionalTensorMode\.export"):
        upstream.is_export(object())


def test_the_tag_for_writes_after_saving_is_read_by_pytorch() -> None:
    """``node.meta['saved_tensor_with_no_vc_check']``."""
    from torch._functorch import autograd_function
    from torch._functorch._aot_autograd import graph_compile

    found: list[Any] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        upstream.allow_writes_after_saving(y)
        found.extend(get_proxy_mode().tracer.graph.nodes)
        return y

    make_fx(run)(torch.ones(2))
    assert [node.meta.get("saved_tensor_with_no_vc_check", False) for node in found] == [False, True]
    for module in (autograd_function, graph_compile):
        assert "saved_tensor_with_no_vc_check" in inspect.getsource(module)


def test_the_tag_of_a_checkpoint_is_read_by_the_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    """``node.meta['recompute']``: lost, a backward would read scales of a later step in silence."""
    node = torch.fx.Graph().placeholder("x")
    upstream.save_in_checkpoint([node])
    assert node.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    from torch._functorch import partitioners

    monkeypatch.setattr(partitioners, "must_recompute", lambda node: node.meta.get("renamed") is not None)
    with pytest.raises(UpstreamError, match=r"node.meta\['recompute'\].*does not read it"):
        upstream.save_in_checkpoint([node])
