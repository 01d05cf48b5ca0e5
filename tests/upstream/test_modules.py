"""The tables of ``nn.Module``."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from narrowcast.upstream import modules
from narrowcast.upstream.private import ENTRIES, UpstreamError

TABLES = [
    "nn.Module._parameters",
    "nn.Module._buffers",
    "nn.Module._modules",
    "nn.Module._non_persistent_buffers_set",
    "nn.Module._forward_pre_hooks",
    "nn.Module._forward_hooks",
    "nn.Module._backward_hooks",
    "nn.Module._backward_pre_hooks",
]


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_there(name: str) -> None:
    assert name in ENTRIES and name.rpartition(".")[2] in vars(nn.Module()), ENTRIES[name].error()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # it runs a second time
@pytest.mark.parametrize("name", TABLES)
def test_the_import_says_which_table_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self) -> None:
            self.__dict__.update({key: {} for key in vars(real) if key != name.rpartition(".")[2]})

    real = nn.Module()
    with monkeypatch.context() as patched:
        patched.setattr(nn, "Module", Other)
        with pytest.raises(UpstreamError, match=f"{name}.*install a release that was tested"):
            runpy.run_module("narrowcast.upstream.modules")


def test_the_tables_are_the_modules_own() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    layer: nn.Module = module[0]
    assert modules.own_children(module) == {"0": layer}
    assert modules.own_parameters(layer)["weight"] is layer.weight
    layer.register_buffer("kept", torch.ones(1), persistent=False)
    modules.own_buffers(layer)["kept"] = torch.zeros(2)
    assert torch.equal(layer.kept, torch.zeros(2))
    modules.drop_buffer(layer, "kept")
    modules.drop_buffer(layer, "kept")
    assert not list(layer.buffers())
    layer.register_buffer("kept", torch.ones(1))
    assert "kept" in layer.state_dict()  # it is no longer taken for one that is not saved


def test_frames_of_a_call() -> None:
    """Of "frames of nn.Module.__call__": a hook's caller runs as long as the forward; calls are on the stack."""
    seen: list[object] = []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(RuntimeError, match="executing"):
                seen[0].clear()  # type: ignore[attr-defined]
            seen.append(modules.running_modules())
            return x

    outer = nn.Sequential(inner := Inner())
    outer.register_forward_pre_hook(lambda module, args: seen.append(modules.calling_frame()))
    outer(torch.ones(1))
    assert seen[1] == [inner, outer]
    seen[0].clear()  # type: ignore[attr-defined]
    assert modules.running_modules() == []


def test_a_frame_at_the_address_of_one_that_ended_is_another() -> None:
    """It is told by its code and by its ``self``, which has the attribute; a method of anything else does not."""

    class Method:
        def of(self, ended: Callable[..., Any] | None = None) -> bool:
            frame = modules.calling_frame(0)
            code = frame.f_code if ended is None else ended.__code__
            return modules.is_frame_of(id(frame), code, "root", "1")

    method = Method()
    assert not method.of()
    method.root = "2"  # type: ignore[attr-defined]
    assert not method.of()
    method.root = "1"  # type: ignore[attr-defined]
    assert method.of() and not method.of(nn.Module.__call__)


def test_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not modules.forward_pre_hooks(module) and not modules.has_backward_hooks(module)
    module.register_forward_pre_hook(print)
    assert list(modules.forward_pre_hooks(module).values()) == [print]
    module.register_full_backward_hook(print)
    assert modules.has_backward_hooks(module)
