"""What narrowcast uses of DistributedDataParallel that is not public: there, and what happens where it is not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

import narrowcast as nc
from narrowcast.upstream import ddp
from narrowcast.upstream.private import ENTRIES, Absent, UpstreamError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(stored: bool = True) -> nn.Module:
    with nc.quantized_model_init(enabled=stored, recipe=nc.recipe.MXFP8BlockScaling()):
        return nc.Linear(32, 32, device="cpu")


@pytest.mark.parametrize("stored", [False, True])
def test_replicas_broadcast_by_the_function_that_is_known(
    stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[Any] = []

    def seen(*args: Any, **options: Any) -> None:
        left_out.append((set(options["params_and_buffers_to_ignore"]), options))

    seen.__signature__ = inspect.signature(ddp._sync_module_states)  # type: ignore[attr-defined]
    monkeypatch.setattr(ddp, "_sync_module_states", seen)
    DistributedDataParallel(make(stored))
    names, options = left_out[0]
    assert names == ({"weight"} if stored else set())
    assert {"process_group", "src"} <= set(options)


def test_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_sync_module_states", Absent(ENTRIES[ddp._SYNC]))
    with pytest.raises(
        UpstreamError, match="_sync_module_states as narrowcast uses it; build the model without"
    ):
        DistributedDataParallel(make())


def test_without_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """``arguments of _sync_module_states``: only models with stored weights are told."""

    def other(model: nn.Module, group: Any) -> str:
        return "broadcast"

    monkeypatch.setattr(ddp, "_sync_module_states", other)
    assert distributed._sync_module_states(make(stored=False), None) == "broadcast"
    with pytest.raises(
        UpstreamError, match="arguments of _sync_module_states as narrowcast uses it .found model"
    ):
        distributed._sync_module_states(make(), None)
