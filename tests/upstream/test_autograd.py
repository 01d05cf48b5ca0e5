"""What narrowcast uses of autograd's and the checkpoint's inside: each entry, and what follows without it."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as cp

import narrowcast as nc
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


def test_after_a_backward() -> None:
    done: list[bool] = []
    y = tensor() * 2
    y.register_hook(lambda grad: autograd.after_backward(lambda: done.append(autograd.is_in_backward())))
    y.sum().backward()
    assert len(done) == 1


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


def test_checkpoints_that_run() -> None:
    seen: list[Any] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.running_checkpoints())
        return (x * x).sin()

    assert autograd.running_checkpoints() == []
    with torch.autograd.graph.save_on_cpu():
        assert autograd.running_checkpoints() == []
        y = cp.checkpoint(run, tensor(), use_reentrant=False)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    (first,), (rerun,), (third,) = seen
    assert first[0] is rerun[0] is third[0]
    assert first[1] is None and len({None, rerun[1], third[1]}) == 3


def test_functions_that_run() -> None:
    seen: list[Any] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append([(context, number, autograd.records_gradients(context)) for context, number in ours()])
        return x * x

    ours = autograd.running_functions
    cp.checkpoint(run, tensor(), use_reentrant=True).sum().backward()  # type: ignore[union-attr]
    ((first, of_first, records),), ((again, of_again, _),) = seen
    assert first is again and of_first is None and of_again >= 0 and records
    with torch.no_grad():
        cp.checkpoint(run, tensor(), use_reentrant=True)
    assert seen[2][0][2] is False


def test_a_module_s_forward_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return autograd.running_functions()

    assert Module()(tensor()) == []


@pytest.mark.parametrize("name", ["_finds_checkpoints", "_finds_functions"])
def test_a_probe_that_fails_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, name, lambda *_: False)
    reentrant = name == "_finds_functions"
    layer = nc.Linear(16, 16, device="cpu", recipe=nc.recipe.DelayedScaling())
    x = torch.randn(4, 16, requires_grad=True)
    message = "recomputation under delayed scaling or outside of its autocast cannot find its forward; use"
    with pytest.raises(UpstreamError, match=message):
        cp.checkpoint(layer, x, use_reentrant=reentrant)
    layer(x).sum().backward()  # outside of checkpoints nothing is asked
    layer.recipe = nc.recipe.Float8CurrentScaling()
    cp.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling()):
        with pytest.raises(UpstreamError, match=message):
            cp.checkpoint(layer, x, use_reentrant=reentrant)
        y = nc.checkpoint(layer, x, use_reentrant=reentrant)
    y.sum().backward()


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as it is on a release that lacks a name."""
    monkeypatch.setattr(private, "HIDDEN", {name})
    monkeypatch.setattr(private, "ENTRIES", dict(private.ENTRIES))
    spec = importlib.util.spec_from_file_location("narrowcast.upstream.lost", autograd.__file__)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def in_checkpoint(module: Any) -> Any:
    found = []

    def run(x: torch.Tensor) -> torch.Tensor:
        found.append(module.running_checkpoints())
        return x.sin()

    cp.checkpoint(run, tensor(), use_reentrant=False)
    return found[0]


def written(module: Any) -> None:
    with module.version_preserved([torch.zeros(1)]):
        pass


RAISES = {
    "torch._C._autograd._top_saved_tensors_default_hooks": in_checkpoint,
    "torch._C._autograd._pop_saved_tensors_default_hooks": in_checkpoint,
    "torch._C._autograd._push_saved_tensors_default_hooks": in_checkpoint,
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
    assert len(in_checkpoint(module)) == 1
    module = without("torch.autograd.Variable._execution_engine.queue_callback", monkeypatch)
    module.after_backward(lambda: pytest.fail("called"))


def test_nothing_is_absent() -> None:
    assert not [name for name, value in vars(autograd).items() if isinstance(value, Absent)]


def test_a_checkpoint_that_is_collected_while_hooks_are_looked_at_takes_its_own() -> None:
    """Before PyTorch 2.15 a checkpoint that raised ends where its frame is collected."""

    def checkpointed() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            yield

    thresholds = gc.get_threshold()
    running = checkpointed()
    next(running)
    cycle: list[Any] = [running]
    cycle.append(cycle)
    try:
        del running, cycle
        gc.set_threshold(1, 1, 1)
        found = autograd._hooks_in_force()
    finally:
        gc.set_threshold(*thresholds)
    assert len(found) == 1
    del found
    gc.collect()
    assert autograd.innermost_hooks() is None
