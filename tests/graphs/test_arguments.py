"""What ``make_graphed_callables`` refuses, and the order in which it captures; no GPU is needed to be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.graphs.arguments import schedule


def layer() -> nc.Linear:
    return nc.Linear(32, 32, device="cpu")


def with_backward_hook() -> nn.Module:
    module = nn.Sequential(layer())
    module[0].register_full_backward_hook(lambda *_: None)
    return module


X = torch.zeros(4, 32)
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (layer(), {"enabled": True, "fp8_enabled": True}, ValueError, "enabled and its old name fp8_enabled"),
    (layer(), {"recipe": 3, "fp8_recipe": 4}, ValueError, "recipe and its old name fp8_recipe"),
    (layer(), {"fp9_enabled": True}, TypeError, "takes no 'fp9_enabled'; did you mean fp8_enabled=."),
    ((layer(), layer()), {}, ValueError, "sample_args has 1 for 2 samples"),
    (layer(), {"enabled": (True, False)}, ValueError, "enabled has 2 values for 1 callables"),
    ((layer(),), {"sample_kwargs": ({}, {})}, ValueError, "sample_kwargs has 2 for 1 samples"),
    (layer(), {"sample_args": (3,)}, TypeError, "a sample argument is an int"),
    (with_backward_hook(), {}, RuntimeError, r"0 \(Linear\) has backward hooks"),
    (layer(), {"capture_time_hooks": []}, NotImplementedError, "capture_time_hooks"),
    (layer(), {"_num_layers_per_chunk": [1]}, ValueError, "without _order"),
    (3, {}, TypeError, "int is not callable"),
    (
        nc.GroupedLinear(2, 32, 32, device="cpu"),
        {"cache_quantized_params": True},
        NotImplementedError,
        "GroupedLinear",
    ),
    (nc.Linear(32, 32, device="cpu", delay_wgrad_compute=True), {}, RuntimeError, "delay_wgrad_compute"),
]


@pytest.mark.parametrize("modules, options, error, message", BAD, ids=[message for *_, message in BAD])
def test_bad_arguments(modules: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    sample: Any = ((X,),) if isinstance(modules, tuple) else (X,)
    with pytest.raises(error, match=message):
        nc.make_graphed_callables(modules, **{"sample_args": sample, **options})


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        nc.make_graphed_callables(layer(), (X,))
    with (
        pytest.warns(
            DeprecationWarning, match="fp8_weight_caching is the old name of cache_quantized_params"
        ),
        pytest.raises(RuntimeError, match="needs a CUDA device"),
    ):
        nc.make_graphed_callables(layer(), (X,), fp8_weight_caching=True)


@pytest.mark.parametrize(
    "order",
    [[], [1, 2, -2], [1, -1, -2, 2], [0, 1, -1], [1.0, -1.0], [1, 1, -1], [1, 3, -3, -1], [-1, 1]],
    ids=str,
)
def test_impossible_orders(order: list[Any]) -> None:
    with pytest.raises(ValueError, match="_order"):
        nc.make_graphed_callables((layer(), layer()), ((X,),) * 2, _order=order)


def test_an_order_with_delayed_weight_gradients_names_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"-1\.5 is a delayed weight gradient.*set delay_wgrad_compute=False"
    ):
        nc.make_graphed_callables((layer(),), ((X,),), _order=[1, -1, -1.5], _num_layers_per_chunk=[1])


def test_orders() -> None:
    assert schedule(3, None, None) == (
        [(True, 0), (True, 1), (True, 2), (False, 2), (False, 1), (False, 0)],
        [0, 1, 2],
    )
    passes, callables = schedule(2, [1, 2, -2, -1], None)
    assert passes == [(True, 0), (True, 1), (False, 1), (False, 0)] and callables == [0, 1]
    passes, callables = schedule(3, [1, 1, 2, -2, -1, 2, -2, -1], [2, 1])
    assert callables == [0, 1, 0, 1, 2, 2]
    assert passes == [
        (True, 0), (True, 1), (True, 2), (True, 3), (True, 4), (False, 4), (False, 1), (False, 0), (True, 5),
        (False, 5), (False, 3), (False, 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="are not the 3 callables"):
        schedule(3, [1, 2, -2, -1], None)
