"""What narrowcast uses of autograd's and the checkpoint's inside: each entry, and what follows without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from narrowcast.upstream import autograd, private
from narrowcast.upstream.private import Absent, UpstreamError


def tensor() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_the_number_of_the_running_backward() -> None:
    seen: list[int] = []
    x = tensor()
    y = x * 2
    y.register_hook(lambda grad: seen.append(autograd.graph_task_id()))
    y.sum().backward()
    assert autograd.graph_task_id() == -1 and not autograd.is_in_backward() and seen[0] >= 0


def test_version_counters_that_count_nothing() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    x.add_(1)
    before = x._version, y._version
    with autograd.version_preserved([x, y]):
        x.add_(1)
        y.add_(1)
    assert (x._version, y._version) == before and x.tolist() == [2, 2]
    with torch.inference_mode():
        z = torch.zeros(2)
    with autograd.version_preserved([z]), torch.inference_mode():
        z.add_(1)


def test_the_level_of_forward_mode() -> None:
    assert autograd.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert autograd.forward_level() == 0
        assert autograd.has_tangent([torch.ones(2), x]) and not autograd.has_tangent([torch.ones(2)])
    assert autograd.forward_level() == -1
    seen: list[int] = []
    torch.func.jvp(lambda x: seen.append(autograd.forward_level()) or x, (torch.ones(2),), (torch.ones(2),))
    assert seen == [0]


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as it is on a release that lacks a name."""
    monkeypatch.setattr(private, "HIDDEN", {name})
    monkeypatch.setattr(private, "ENTRIES", dict(private.ENTRIES))
    spec = importlib.util.spec_from_file_location("narrowcast.upstream.lost", autograd.__file__)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def written(module: Any) -> None:
    with module.version_preserved([torch.zeros(1)]):
        pass


RAISES = {
    "torch._C._autograd._top_saved_tensors_default_hooks": lambda module: module.innermost_hooks(),
    "torch._C._current_graph_task_id": lambda module: module.is_in_backward(),
    "torch._C._autograd._unsafe_set_version_counter": written,
}


@pytest.mark.parametrize("name", RAISES)
def test_a_lost_name_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = without(name, monkeypatch)
    with pytest.raises(UpstreamError, match=f"has no {name} as narrowcast uses it"):
        RAISES[name](module)


def test_lost_names_with_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = without("torch._C._autograd._saved_tensors_hooks_is_enabled", monkeypatch)
    with torch.autograd.graph.save_on_cpu():
        assert len(module.innermost_hooks()) == 2


def test_nothing_is_absent() -> None:
    assert not [name for name, value in vars(autograd).items() if isinstance(value, Absent)]
