"""The tables of ``nn.Module``."""

from __future__ import annotations

import runpy

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


def test_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not modules.forward_pre_hooks(module) and not modules.has_backward_hooks(module)
    module.register_forward_pre_hook(print)
    assert list(modules.forward_pre_hooks(module).values()) == [print]
    module.register_full_backward_hook(print)
    assert modules.has_backward_hooks(module)
