"""How Inductor meets an operator that stays one node until it lowers it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowcast.upstream import lowering
from narrowcast.upstream.private import ENTRIES
from narrowcast.upstream.tensors import storage_key

WRAP = "torch._higher_order_ops.triton_kernel_wrap"


@pytest.fixture
def library() -> Any:
    with torch.library._scoped_library("narrowcast_test", "DEF") as library:
        yield library


def double(library: Any) -> Any:
    """An operator that doubles in eager code."""
    library.define("double(Tensor x, float factor=2.0) -> Tensor")
    library.impl("double", lambda x, factor=2.0: x * factor, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "narrowcast_test::double", lambda x, factor=2.0: torch.empty_like(x), lib=library
    )
    return torch.ops.narrowcast_test.double.default


@pytest.mark.inductor
@pytest.mark.parametrize("whole", [False, True])
def test_a_rule_takes_the_place_of_an_operator(library: Any, whole: bool) -> None:
    import torch._inductor.lowering as theirs

    operator, calls = double(library), list[Any]()

    def rule(call: lowering.Call) -> Any:
        (x, *numbers), (value,) = call.given, call.values
        calls.append((type(x).__name__, numbers, call.memory(value)))
        call.kept["count"] = call.kept.get("count", 0) + 1
        if whole:
            return call.keep_whole()
        return call.run(lowering.trace(lambda x: x * 3, [x]), [value])

    lowering.register(operator, rule)
    assert lowering.is_inductor_loaded()
    x = torch.arange(6.0).view(2, 3)
    with torch._inductor.config.patch(force_disable_caches=True):  # no key of theirs has the rule
        y = torch.compile(lambda x: operator(operator(x + 1)) + operator(x.t()).sum(), fullgraph=True)(x)
    del theirs.lowerings[operator]
    by = 2 if whole else 3
    assert torch.equal(y, (x + 1) * by * by + x.sum() * by)
    assert [(kind, numbers) for kind, numbers, _ in calls] == [("FakeTensor", [])] * 3
    assert len({name for *_, name in calls}) == 3 and None not in {name for *_, name in calls}


def test_without_a_name_operators_stay_whole(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.lowering as theirs

    operator = double(library)
    for entry in lowering._USED:
        monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", {entry.name})
        lowering.register(operator, lambda call: None)
        assert operator not in theirs.lowerings


def launch_graph() -> tuple[fx.Graph, Tensor, Tensor]:
    """A launch that has ``x``, a view of it, ``y`` and a number."""
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    with FakeTensorMode():
        x, y = torch.empty(2, 4), torch.empty(4)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "view", "y")]
    for node, value in zip(nodes, (x, x.view(8), y)):
        node.meta["val"] = value
    kwargs = dict(zip(("x_ptr", "view_ptr", "y_ptr"), nodes)) | {"n": 8}
    graph.call_function(wrap.triton_kernel_wrapper_mutation, kwargs={"kwargs": kwargs})
    graph.output(None)
    return graph, x, y


@pytest.mark.parametrize("lost", [*(one.name for one in (lowering._WHOLE, lowering._SET)), ""])
def test_inductor_hears_what_a_launch_writes_to(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._higher_order_ops.triton_kernel_wrap as wrap
    from torch._inductor.virtualized import V

    names = ("identify_mutated_tensors", "identify_accessed_tensors")
    name = next(name for name in names if hasattr(wrap, name))
    assert f"{WRAP}.{name}" in ENTRIES

    def found(kernel: Any, kwargs: dict[str, Any], descriptors: Any) -> Any:
        return "found"

    found.__name__ = name
    monkeypatch.setattr(wrap, name, found)
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", {lost})
    lowering.hear_writes()
    find = getattr(wrap, name)
    needs_lost = lost and name == names[1]
    assert (find is found) == bool(needs_lost)
    lowering.hear_writes()
    assert getattr(wrap, name) is find
    graph, x, _ = launch_graph()
    lowering.tell_writes(graph, {storage_key(x)})
    *_, launch, _ = graph.nodes
    boxes = {key: types.SimpleNamespace(realize=None) for key in ("x_ptr", "view_ptr", "y_ptr")}
    asked = None, {**boxes, "n": 8}, {}
    assert find(*asked) == "found"  # nothing is lowered
    for node in (launch, next(iter(graph.nodes))):
        with V.set_graph_handler(types.SimpleNamespace(current_node=node)):  # type: ignore[arg-type]
            accesses = find(*asked)
        if needs_lost or node is not launch:
            assert accesses == "found"
        elif name == names[0]:
            assert accesses == ["y_ptr"]
        else:
            of = accesses.read_writes
            sides = [[one.name for one in side] for side in (of.reads, of.writes)]
            assert sides == [[*boxes], ["y_ptr"]] and not accesses.can_fuse_epilogue
