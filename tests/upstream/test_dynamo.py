"""What runs for real while the compiler traces, and what it knows of the traced code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowcast._tracing import refuse_in_one_graph, traced_local, while_tracing
from narrowcast.upstream import dynamo
from narrowcast.upstream.private import UpstreamError, entry

SEEN: dict[str, Any] = {}
FOUND: list[bool] = []


@dataclasses.dataclass(frozen=True)
class Record:
    number: int
    names: tuple[str, ...]
    function: Any = None


OUTSIDE = Record(5, ("a",))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _see(context: Any) -> None:
    SEEN.update({name: traced_local(context, name) for name in SEEN})


def _note(context: Any) -> None:
    FOUND.append(dynamo.is_in_subgraph(context))


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="eager", fullgraph=True, **options)


def test_locals_of_traced_code() -> None:
    """``VariableTracker.source`` and its attribute reader (var_getattr, tp_getattro_impl)."""
    SEEN.clear()
    SEEN.update(dict.fromkeys(("number", "made", "outside", "listed", "function"), "nothing"))

    def run(x: torch.Tensor, outside: Record) -> torch.Tensor:
        number, made, function = 3, Record(x.dim(), ("b", "c"), double), double
        listed = [outside, number]
        while_tracing(_see)
        return function(x) + number + made.number + len(listed)

    _compiled(run)(torch.ones(2, 2), OUTSIDE)
    assert SEEN["number"] == 3 and SEEN["function"] is double
    assert SEEN["outside"] is OUTSIDE and SEEN["listed"] == [OUTSIDE, 3]
    assert SEEN["made"] == Record(2, ("b", "c"), double)
    assert dynamo._SOURCE.name == "VariableTracker.source"


def test_a_record_is_not_read_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """VariableTracker's attribute reader (var_getattr, tp_getattro_impl) under a third name."""
    monkeypatch.setattr(dynamo, "_FIELD_READERS", ["no_such_reader"])
    SEEN.clear()
    SEEN["made"] = None

    def run(x: torch.Tensor) -> torch.Tensor:
        made = Record(x.dim(), ())
        while_tracing(_see)
        return x + made.number

    with pytest.raises(Exception, match=r"UpstreamError: .*attribute reader.*build recipes outside"):
        _compiled(run)(torch.ones(2))


def test_one_graph() -> None:
    """``InstructionTranslator.one_graph`` says whether a graph may break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        while_tracing(lambda context: refuse_in_one_graph(context, "no part of a graph"))
        return x * 2

    with pytest.raises(Exception, match="no part of a graph"):
        _compiled(run)(torch.ones(2))
    torch.compiler.reset()
    assert torch.equal(torch.compile(run, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))


class _Bare:
    """A context whose translator lacks what was renamed."""

    def _i_will_not_complain_if_bc_breaks_InstructionTranslator(self) -> Any:
        return object()


@pytest.mark.parametrize(
    "name, use",
    [
        ("InstructionTranslator.one_graph", dynamo.is_one_graph),
        ("InstructionTranslator.output.root_tx.f_code", dynamo.compiled_code),
        ("InstructionTranslator.output.current_tracer.parent", dynamo.is_in_subgraph),
        ("InstructionTranslator.output.current_tracer.parent", dynamo.begin_side_effects),
    ],
)
def test_a_translator_without_the_name(name: str, use: Any) -> None:
    with pytest.raises(UpstreamError, match=name):
        use(_Bare())


def test_the_code_that_is_compiled() -> None:
    """``InstructionTranslator.output.root_tx.f_code`` is that of the function that was called, not of what it calls."""
    found: list[Any] = []

    def note(context: Any) -> None:
        found.append(dynamo.compiled_code(context))

    def part(x: torch.Tensor) -> torch.Tensor:
        while_tracing(note)
        return x * 2

    def run(x: torch.Tensor) -> torch.Tensor:
        return part(x)

    _compiled(run)(torch.ones(2))
    assert found[-1] is run.__code__


def test_a_checkpoint_is_a_subgraph() -> None:
    """``InstructionTranslator.output.current_tracer.parent`` tells a checkpoint from the graph around it."""
    FOUND.clear()

    def part(x: torch.Tensor) -> torch.Tensor:
        while_tracing(_note)
        return x.sin()

    def run(x: torch.Tensor) -> torch.Tensor:
        return part(x) + checkpoint(part, x, use_reentrant=False)

    _compiled(run)(torch.ones(2, requires_grad=True))
    assert set(FOUND) == {True, False}


def test_side_effects_inside_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SubgraphTracer.allow_side_effects_in_hop`` is taken back at the end; without it a checkpoint raises."""

    class Tracer:
        parent = object()
        allow_side_effects_in_hop = False

    tracer: Any = Tracer()
    monkeypatch.setattr(dynamo, "_tracer", lambda context: tracer)
    dynamo.begin_side_effects(None)
    assert tracer.allow_side_effects_in_hop is True
    dynamo.end_side_effects(None)
    assert tracer.allow_side_effects_in_hop is False
    del Tracer.allow_side_effects_in_hop, tracer.allow_side_effects_in_hop
    with pytest.raises(
        UpstreamError, match=r"SubgraphTracer.allow_side_effects_in_hop.*narrowcast.set_recipe"
    ):
        dynamo.begin_side_effects(None)
    tracer.parent = None  # no checkpoint around: nothing is refused
    dynamo.begin_side_effects(None)


def test_without_comptime_the_trace_ends_also_without_fullgraph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dynamo,
        "_comptime",
        dynamo.Absent(entry("a name of comptime", follows="a file", without="run without torch.compile")),
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        while_tracing(print)
        return x * 2

    with pytest.raises(Exception, match="UpstreamError: .*run without torch.compile"):
        torch.compile(run, backend="eager")(torch.ones(2))
