"""Functionalization's tensors, modes and tags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
