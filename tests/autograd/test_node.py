"""Autograd functions as nodes of a graph: what the graph holds, what keys it has, and that caches keep it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast._tracing import give_key
from narrowcast.autograd import ProgramFunction, node
from narrowcast.nn import layernorm_mlp
from narrowcast.quantizers import Float8CurrentScalingQuantizer
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, Format, linear_plan
from narrowcast.recipe.plan import LinearPlan, _text

LAYERS = {
    "Linear": lambda: nc.Linear(16, 32),
    "LayerNormLinear": lambda: nc.LayerNormLinear(16, 32),
    "LayerNormMLP": lambda: nc.LayerNormMLP(16, 32),
    "GroupedLinear": lambda: nc.GroupedLinear(2, 16, 32),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_layer_is_one_node(name: str, recipe: str) -> None:
    """Which has the bits of eager code."""
    layer, graphs = LAYERS[name](), []
    nc.set_recipe(layer, recipe)
    x = torch.randn(32, 16)
    splits = [torch.tensor([8, 24])] if name == "GroupedLinear" else []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    expected = layer(x, *splits)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend=keep, fullgraph=True)(x, *splits), expected)
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert not any(isinstance(target, torch._ops.HigherOrderOperator) for target in targets)
    named = [target.__name__ for target in targets if target.__module__.startswith("narrowcast.")]
    assert named == [{"Linear": "_linear", "GroupedLinear": "_grouped"}.get(name, "_program")]


def plan_of(recipe: nc.recipe.Recipe, needs_input: bool = True) -> LinearPlan:
    """Return the plan of a compiled layer."""
    layer = nc.Linear(16, 16, recipe=recipe)
    torch._dynamo.reset()
    torch.compile(layer, backend="eager")(torch.randn(16, 16, requires_grad=needs_input))
    plan = linear_plan(
        recipe, layer._stages[0].name, needs_input, True, module_type="linear", weight_elements=256
    )
    assert plan.key
    return plan


def test_plans_that_do_the_same_have_one_key() -> None:
    assert plan_of(Float8CurrentScaling()).key == plan_of(Float8CurrentScaling()).key
    keys = [
        plan_of(DelayedScaling()).key,
        plan_of(DelayedScaling(fp8_format=Format.E4M3)).key,
        plan_of(Float8CurrentScaling()).key,
        plan_of(Float8CurrentScaling(), needs_input=False).key,
        plan_of(Float8CurrentScaling(emulate=True, backward_override="dequantized")).key,
    ]
    assert len({*keys}) == len(keys)


class Mine(Float8CurrentScalingQuantizer):
    """A quantizer of a user, whose code no key knows."""


def test_plans_of_a_users_quantizer_have_keys_of_their_own() -> None:
    """Another process may define the class in another way."""
    plan = plan_of(Float8CurrentScaling())
    mine = dataclasses.replace(
        plan, input=dataclasses.replace(plan.input, quantizer=Mine(nc.DType.kFloat8E4M3))
    )
    other = dataclasses.replace(mine)
    for one in (mine, other):
        give_key(one, _text(one))
    assert mine == other and mine.key != other.key


@pytest.mark.parametrize("gpu", [True, False])
def test_the_keys_of_caches_have_the_launcher_of_kernels(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that finds all graphs in the cache puts no kernel into one, and must make the same keys."""
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(node, "start_kernels_statically", lambda: seen.append(True))
    node._allow_in_graph(None)
    assert seen == [True] * gpu


TRAINED = """
model = torch.nn.Sequential(nc.LayerNormLinear(16, 16), nc.Linear(16, 16))
nc.set_recipe(model, "delayed")
out = torch.compile(model, fullgraph=True)(torch.ones(16, 16))
out.square().sum().backward()
"""
NORM_ALONE = """
with torch.no_grad():
    out = torch.compile(nc.RMSNorm(16), fullgraph=True)(torch.ones(16, 16))
"""
AROUND = """
import json, torch
import narrowcast as nc
torch.manual_seed(0)
{}
found = torch._dynamo.utils.counters["aot_autograd"]
print(json.dumps([found["autograd_cache_hit"], found["autograd_cache_bypass"], out.sum().item()]))
"""


@pytest.mark.inductor
@pytest.mark.parametrize("step", [TRAINED, NORM_ALONE], ids=["trained", "norm alone"])
def test_another_process_finds_the_graph(step: str, tmp_path: Path) -> None:
    """Not where a switch of the library differs, which may change what a graph does."""
    found = []
    for switches in ({}, {}, {"NARROWCAST_INLINE": "0"}):
        environment = {**os.environ, **switches, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", AROUND.format(step)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (first, *_), (second, *_), (other, *_) = found
    assert (first, second, other) == (0, 1, 0)
    assert [bypassed for _, bypassed, _ in found] == [0, 0, 0]
    assert len({total for *_, total in found}) == 1


def test_a_graph_whose_layer_was_made_inside_is_traced() -> None:
    """A recipe that the graph makes has no key yet."""
    layer, x = nc.Linear(16, 16), torch.randn(16, 16)

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling()):
            return layer(x)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, backend="aot_eager")(x), step(x))


def test_a_model_that_shares_a_layer() -> None:
    """Two calls of one program in one graph."""
    layer, x = nc.LayerNormMLP(16, 32), torch.randn(16, 16, requires_grad=True)
    nc.set_recipe(layer, "delayed")
    model = nn.Sequential(layer, layer)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        x.grad = None
        run(x).square().sum().backward()
        results.append([x.grad, *[parameter.grad for parameter in model.parameters()]])
    assert all(map(torch.equal, *results))


def test_plans_of_a_recomputation_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced code reads their keys, and the autograd function the plans where the call does not cross."""
    calls: list[Any] = []

    def apply(call: Any, *tensors: Any) -> torch.Tensor:
        calls.append(call)
        return ProgramFunction.apply(call, *tensors)

    monkeypatch.setattr(layernorm_mlp, "ProgramFunction", SimpleNamespace(apply=apply))
    nc.LayerNormMLP(16, 32, checkpoint=True, recipe=Float8CurrentScaling())(torch.ones(16, 16))
    (call,) = calls
    assert [len([*call.forward_plans]) for _ in range(2)] == [2, 2]
